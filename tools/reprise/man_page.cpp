#include "man_page.h"

#include <reprise/version.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>
#include <string_view>
#include <vector>

namespace reprise::command {
namespace {

/// Reads one character in UTF-8 from the front of `text`. Bytes that are none count as one
/// character each.
char32_t next_character(std::string_view& text) {
  const auto byte = [&](size_t i) {
    return static_cast<unsigned char>(i < text.size() ? text[i] : 0);
  };
  const unsigned char first = byte(0);
  const size_t more = first >= 0xf0   ? 3
                      : first >= 0xe0 ? 2
                      : first >= 0xc0 ? 1
                                      : 0;
  char32_t value = more == 0 ? first : first & (0x3fU >> more);
  for (size_t i = 1; i <= more; ++i) value = value << 6U | (byte(i) & 0x3fU);
  text.remove_prefix(std::min(more + 1, text.size()));
  return value;
}

/// Text without roff's special characters. Non-ASCII characters are named, so that the page
/// does not depend on an encoding.
std::string roff(std::string_view text) {
  constexpr char32_t kFirstNonAscii = 0x80;
  std::string result;
  bool line_begins = true;
  while (!text.empty()) {
    const char32_t letter = next_character(text);
    if (line_begins && (letter == '.' || letter == '\'')) result += "\\&";
    line_begins = letter == '\n';
    if (letter >= kFirstNonAscii) {
      result += fmt::format("\\[u{:04X}]", static_cast<uint32_t>(letter));
    } else if (letter == '\\') {
      result += "\\e";
    } else if (letter == '-') {
      result += "\\-";
    } else if (letter == '\'') {
      result += "\\(aq";
    } else if (letter == '~') {
      result += "\\(ti";
    } else if (letter == '^') {
      result += "\\(ha";
    } else if (letter == '`') {
      result += "\\(ga";
    } else {
      result += static_cast<char>(letter);
    }
  }
  return result;
}

std::string bold(std::string_view text) {
  return "\\fB" + roff(text) + "\\fR";
}

std::string italic(std::string_view text) {
  return "\\fI" + roff(text) + "\\fR";
}

/// A placeholder: words that are values in bold, others in italics.
std::string placeholder(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> parts;
  for (std::string part; std::getline(stream, part, '|');) {
    const bool literal =
        part.find_first_of("abcdefghijklmnopqrstuvwxyz") != std::string::npos;
    parts.push_back(literal ? bold(part) : italic(part));
  }
  return fmt::format("{}", fmt::join(parts, "|"));
}

/// Breaks a line at spaces, so that none is long. roff fills them again.
std::string folded(std::string line) {
  constexpr size_t kWidth = 78;
  size_t begin = 0;
  while (line.size() - begin > kWidth) {
    size_t space = line.rfind(' ', begin + kWidth);
    if (space == std::string::npos || space <= begin) {
      space = line.find(' ', begin + kWidth);
    }
    if (space == std::string::npos) break;
    line[space] = '\n';
    begin = space + 1;
    if (begin < line.size() && line[begin] == '.') line.insert(begin, "\\&");
  }
  return line;
}

/// Lines of a help text. Indented ones are a list and keep their line breaks.
std::string paragraph(const std::string& help) {
  std::istringstream stream(help);
  std::string text;
  bool listing = false;
  for (std::string line; std::getline(stream, line);) {
    const bool indented = line.starts_with("  ");
    if (indented != listing) {
      text += indented ? ".RS 2\n.nf\n" : ".fi\n.RE\n";
      listing = indented;
    }
    const size_t begin = line.find_first_not_of(' ');
    if (begin == std::string::npos) continue;
    const std::string_view rest = std::string_view(line).substr(begin);
    text += (listing ? roff(rest) : folded(roff(rest))) + "\n";
  }
  if (listing) text += ".fi\n.RE\n";
  return text;
}

std::string entry_of(const FlagEntry& flag) {
  std::vector<std::string> names;
  for (const std::string& name : flag.names) names.push_back(bold(name));
  std::string tag = fmt::format("{}", fmt::join(names, ", "));
  if (!flag.placeholder.empty()) {
    std::string value = placeholder(flag.placeholder);
    for (int i = 1; i < flag.values; ++i)
      value += " " + placeholder(flag.placeholder);
    if (flag.optional_value) value = "[" + value + "]";
    tag += (tag.empty() ? "" : " ") + value;
  }
  std::string text = fmt::format(".TP\n{}\n{}", tag, paragraph(flag.help));
  if (flag.required) text += ".br\nRequired.\n";
  if (!flag.default_value.empty() && flag.default_value != "[]") {
    text += fmt::format(".br\nDefault: {}\n", folded(bold(flag.default_value)));
  }
  return text;
}

/// The flags of a command by group, in the order of the groups' first flags.
std::string entries_of(const CommandEntry& command) {
  std::vector<std::string> groups;
  std::string text;
  for (const FlagEntry& argument : command.arguments)
    text += entry_of(argument);
  for (const FlagEntry& flag : command.flags) {
    if (std::find(groups.begin(), groups.end(), flag.group) != groups.end()) {
      continue;
    }
    text += (text.empty() ? "" : ".PP\n") + italic(flag.group) + "\n";
    groups.push_back(flag.group);
    for (const FlagEntry& other : command.flags) {
      if (other.group == flag.group) text += entry_of(other);
    }
  }
  return text;
}

std::string synopsis(const CommandEntry& command) {
  std::string line = bold("reprise") + " " + bold(command.name);
  for (const FlagEntry& flag : command.flags) {
    if (!flag.required) continue;
    line +=
        " " + bold(flag.names.front()) + " " + placeholder(flag.placeholder);
  }
  line += " [" + italic("FLAGS") + "]";
  for (const FlagEntry& argument : command.arguments) {
    const std::string value = placeholder(argument.placeholder);
    line += " " + (argument.required ? value : "[" + value + "]");
  }
  return line;
}

std::string subsection(const CommandEntry& command) {
  return fmt::format(".SS {}\n{}.PP\n{}\n{}.PP\n{}", roff(command.name),
                     paragraph(command.help + "."), synopsis(command),
                     entries_of(command), paragraph(command.footer));
}

}  // namespace

std::string man_page(const CommandTree& tree) {
  const BuildInfo build = build_info();
  std::string text = fmt::format(
      ".\\\" Written by: reprise man\n"
      ".TH REPRISE 1 {} \"Reprise {}\" \"User Commands\"\n"
      ".SH NAME\nreprise \\- train a model within a memory budget\n"
      ".SH SYNOPSIS\n",
      build.date.empty() ? "\"\"" : build.date, roff(build.version));
  for (const CommandEntry& command : tree.subcommands) {
    text += synopsis(command) + "\n.PP\n";
  }
  text += bold("reprise --help") + "\n.PP\n" + bold("reprise --version") +
          " [" + bold("--format") + " " + placeholder("table|json") + "]\n";
  text += ".SH DESCRIPTION\n" + paragraph(tree.program.help);
  text += ".PP\n" + paragraph(tree.program.footer);
  text += ".SH OPTIONS\n" + entries_of(tree.program);
  text += ".SH SUBCOMMANDS\n";
  for (const CommandEntry& command : tree.subcommands) {
    text += subsection(command);
  }
  return text;
}

}  // namespace reprise::command
