#include "base/process.h"

#include "support.h"

#include <reprise/base/error.h>

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

namespace reprise {
namespace {

ProcessResult shell(const std::string& script,
                    const ProcessOptions& options = {}) {
  return run_process({"/bin/sh", "-c", script}, options);
}

TEST(Process, ReturnsOutputAndStatus) {
  const auto result = shell("echo out; echo err >&2; exit 3");
  EXPECT_EQ(result.status, 3);
  EXPECT_EQ(result.signal, 0);
  EXPECT_EQ(result.out, "out\n");
  EXPECT_EQ(result.error, "err\n");
  EXPECT_FALSE(result.timed_out || result.stopped || result.killed_for_memory);
}

TEST(Process, ReadsLargeOutputWithoutBlocking) {
  const auto result = shell(
      "head -c 3000000 /dev/zero | tr '\\0' x; "
      "head -c 3000000 /dev/zero | tr '\\0' y >&2; echo end >&2");
  EXPECT_EQ(result.status, 0);
  EXPECT_EQ(result.out.size(), 3000000u);
  EXPECT_LT(result.error.size(), 1u << 20);
  EXPECT_EQ(result.error.substr(result.error.size() - 4), "end\n");
}

TEST(Process, InputIsEmpty) {
  EXPECT_EQ(shell("cat").out, "");
}

TEST(Process, ReportsTheSignalThatKilledIt) {
  const auto result = shell("kill -SEGV $$");
  EXPECT_EQ(result.status, -1);
  EXPECT_EQ(result.signal, SIGSEGV);
  EXPECT_FALSE(result.killed_for_memory);
}

TEST(Process, TimeOutKillsEvenIfSigtermIsIgnored) {
  const auto result = shell("trap '' TERM; sleep 60", {.timeout_s = 0.2});
  EXPECT_TRUE(result.timed_out);
  EXPECT_EQ(result.signal, SIGKILL);
  EXPECT_LT(result.wall_s, 20);
}

TEST(Process, StopEndsTheProgram) {
  const auto start = std::chrono::steady_clock::now();
  const auto result = shell("sleep 60", {.stop = [&] {
                              return std::chrono::steady_clock::now() - start >
                                     std::chrono::milliseconds(200);
                            }});
  EXPECT_TRUE(result.stopped);
  EXPECT_FALSE(result.timed_out);
  EXPECT_LT(result.wall_s, 20);
}

TEST(Process, MemoryLimitMakesAllocationsFail) {
  const char* eater = "python3 -c 'b = bytearray(600 << 20); print(len(b))'";
  EXPECT_EQ(shell(eater).status, 0);
  const auto limited = shell(eater, {.memory_limit = int64_t{300} << 20});
  EXPECT_NE(limited.status, 0);
  EXPECT_NE(limited.error.find("MemoryError"), std::string::npos)
      << limited.error;
}

TEST(Process, ReportsPeakMemory) {
  const auto result = shell(
      "exec python3 -c 'import time; b = bytearray(200 << 20); "
      "time.sleep(0.3)'");
  EXPECT_GT(result.rss_peak_bytes, int64_t{200} << 20);
  EXPECT_LT(result.rss_peak_bytes, int64_t{300} << 20);
}

TEST(Process, MissingProgramIsAnError) {
  const auto error =
      testing::error_of([] { run_process({"/no/such/program"}); });
  EXPECT_NE(error.find("cannot run /no/such/program: No such file"),
            std::string::npos)
      << error;
  EXPECT_THROW(run_process({"/no/such/program"}), Error);
  EXPECT_THROW(run_process({"/"}), Error);  // not executable
  EXPECT_THROW(run_process({}), Error);
}

TEST(Process, DiscardsWhatIsNotWanted) {
  const auto result = shell("echo out; echo err >&2; head -c 200000 /dev/zero",
                            {.discard_error = true, .output_limit = 3});
  EXPECT_EQ(result.status, 0);
  EXPECT_EQ(result.error, "");
  EXPECT_EQ(result.out.substr(0, 4), "out\n");
  EXPECT_LT(result.out.size(), 200000u);
}

TEST(Process, LastLineSkipsBlankOnes) {
  EXPECT_EQ(last_line("one\ntwo \n \n"), "two");
  EXPECT_EQ(last_line("one"), "one");
  EXPECT_EQ(last_line(" \n\n"), "");
  EXPECT_EQ(last_line(""), "");
}

TEST(Process, ShellLineIsReadBackByAShell) {
  const std::vector<std::string> words = {"printf", "%s|", "plain", "two words",
                                          "it's",   "",    "$HOME", "a=b:c"};
  EXPECT_EQ(shell(shell_line(words)).out, "plain|two words|it's||$HOME|a=b:c|");
  EXPECT_EQ(shell_line({"a", "b c"}), "a 'b c'");
}

/// Waits for a child without a time limit of its own.
ProcessEnd end_of(ChildProcess& child) {
  while (!child.poll()) usleep(1000);
  return *child.poll();
}

TEST(Process, ChildReplacesTheEnvironment) {
  ChildProcess child({"/bin/sh", "-c", "exit $STATUS"},
                     {.environment = std::vector<std::string>{"STATUS=7"}});
  EXPECT_EQ(end_of(child).status, 7);
  EXPECT_TRUE(child.ended());
  EXPECT_EQ(child.output(), -1);
}

TEST(Process, SeveralChildrenRunAtOnce) {
  std::vector<ChildProcess> children;
  for (int i = 0; i < 3; ++i) {
    children.emplace_back(std::vector<std::string>{"/bin/sleep", "60"});
  }
  children[1].send(SIGTERM);
  EXPECT_EQ(end_of(children[1]).signal, SIGTERM);
  EXPECT_FALSE(children[0].poll());
  EXPECT_FALSE(children[2].poll());
}

TEST(Process, ChildLeadsItsOwnProcessGroup) {
  ChildProcess child({"/bin/sleep", "60"});
  EXPECT_EQ(getpgid(child.pid()), child.pid());
  child.send_to_group(SIGKILL);
  EXPECT_EQ(end_of(child).signal, SIGKILL);
}

TEST(Process, SuspendedChildIsReported) {
  ChildProcess child({"/bin/sleep", "60"});
  child.send(SIGSTOP);
  while (!child.suspended()) child.poll();
  EXPECT_FALSE(child.ended());
  child.send(SIGCONT);
  while (child.suspended()) child.poll();
  EXPECT_FALSE(child.ended());
}

TEST(Process, ChildIsKilledWhenItsObjectIsDestroyed) {
  pid_t pid = 0;
  {
    const ChildProcess child({"/bin/sleep", "60"});
    pid = child.pid();
    EXPECT_EQ(kill(pid, 0), 0);
  }
  EXPECT_EQ(kill(pid, 0), -1);
}

/// A study that is killed leaves no training running.
TEST(Process, DiesWithItsParent) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t parent = fork();
  ASSERT_GE(parent, 0);
  if (parent == 0) {
    close(ends[0]);
    // The program holds the write end of the pipe as long as it runs.
    const std::string end = std::to_string(ends[1]);
    try {
      // dash supports only one-digit descriptors.
      run_process(
          {"/bin/bash", "-c", "echo started >&" + end + "; exec sleep 300"});
    } catch (...) {
    }
    _exit(0);
  }
  close(ends[1]);
  char text[8];
  ASSERT_EQ(read(ends[0], text, sizeof text), 8);
  kill(parent, SIGKILL);
  waitpid(parent, nullptr, 0);
  pollfd gone{ends[0], POLLIN, 0};
  EXPECT_EQ(poll(&gone, 1, 10'000), 1);
  EXPECT_EQ(read(ends[0], text, sizeof text), 0);
  close(ends[0]);
}

}  // namespace
}  // namespace reprise
