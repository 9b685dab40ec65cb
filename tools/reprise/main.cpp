#include <reprise/command.h>

int main(int argc, char** argv) {
  return reprise::run_command(argc, argv);
}
