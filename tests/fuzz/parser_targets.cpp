// Formats whose parsers use no tensors, and need nothing of LibTorch but its errors when they run.
// coverage/ compiles them a second time, with clang and libFuzzer.
#include "base/text_check.h"
#include "data/safetensors_header.h"
#include "data/tensor_checksums.h"
#include "distributed/store_protocol.h"
#include "distributed/store_server.h"
#include "target.h"
#include "train/store/last_metrics.h"

#include <reprise/base/bytes.h>
#include <reprise/base/error.h>
#include <reprise/plan/planner.h>
#include <reprise/recompute/simulate.h>
#include <reprise/recompute/strategy.h>
#include <reprise/study/study_file.h>
#include <reprise/train/summary.h>

#include <algorithm>

namespace reprise::fuzz {
namespace {

using detail::StoreServer;

Schedule keep_all(int stages) {
  std::vector<Op> ops;
  for (int i = 0; i < stages; ++i) ops.push_back({OpKind::kForwardKeep, i});
  for (int i = stages; i-- > 0;) ops.push_back({OpKind::kBackward, i});
  return Schedule("all", stages, ops);
}

void run_header(const std::string& path, const std::string&) {
  const auto header = detail::read_safetensors_header(InputFile(path));
  const auto sums = header.metadata.find(detail::kChecksumsKey);
  if (sums == header.metadata.end()) return;
  detail::TensorChecksums tensors;
  for (const auto& [name, entry] : header.entries) tensors[name] = 0;
  (void)detail::parse_checksums(header.text, sums->second, tensors);
}

void run_study(const std::string& path, const std::string&) {
  static const std::vector<std::string> keys{
      "model",     "depth",     "width",  "data",    "random-samples",
      "batch",     "optimizer", "lr",     "threads", "workers",
      "recompute", "memory",    "repeat", "steps",   "accumulate"};
  const Study study = open_study(path, keys);
  for (size_t i = 0; i < std::min<size_t>(study.runs.size(), 4); ++i) {
    (void)study.runs[i].description(study.constant);
    (void)study.runs[i].id(study.name, "cpu");
  }
}

void run_metrics(const std::string& path, const std::string&) {
  TrainSummary summary;
  detail::add_last_metrics(summary, path);
}

/// Costs that are accepted can be simulated.
void run_profile(const std::string&, const std::string& input) {
  const CostProfile profile = profile_from_json(input);
  if (profile.sizes.empty()) return;
  for (const int64_t size : {1, 3, 1000}) {
    const ChainCosts costs = profile.at(size).chain_costs;
    if (costs.stages.empty()) return;
    (void)simulate(keep_all(static_cast<int>(costs.stages.size())), costs);
  }
}

void run_plan(const std::string&, const std::string& input) {
  const Plan plan = plan_from_json(input, 4);
  (void)to_json(plan);
}

void run_summary(const std::string&, const std::string& input) {
  const TrainSummary summary = summary_from_json(input);
  (void)compare(summary, summary);
  (void)to_table(summary);
  (void)to_json(summary);
}

void run_schedule(const std::string&, const std::string& input) {
  const int stages = 1 + static_cast<int>(choice_of(input, 6));
  if (is_schedule_text(input) || choice_of(input, 2) == 0) {
    (void)Schedule::parse("fuzz", stages, input).to_string();
  } else {
    (void)make_schedule(input, stages);
  }
}

void run_bytes(const std::string&, const std::string& input) {
  (void)byte_size(1)(input);
  (void)format_bytes(parse_bytes(input));
}

/// Reads until the other end closes the connection. Returns whether it has sent anything.
bool has_sent(const Socket& from, Deadline until) {
  size_t bytes = 0;
  try {
    for (char byte = 0;; ++bytes) from.read(&byte, 1, until);
  } catch (const Error&) {
  }
  return bytes > 0;
}

/// A connection that has proved the token, to a server that is a rank's.
Socket rank_connection(const StoreServer& server, const std::string& token,
                       Deadline until) {
  Socket made = connect_to(server.address(), until);
  const std::string own(detail::kNonceBytes, 'n');
  const std::string hello = std::string(detail::kRankMagic) + own;
  made.write(hello.data(), hello.size(), until);
  std::string challenge(detail::kChallengeBytes, '\0');
  made.read(challenge.data(), challenge.size(), until);
  const std::string proof = detail::proof_of_rank(
      token,
      own + challenge.substr(detail::kStoreMagic.size(), detail::kNonceBytes));
  made.write(proof.data(), proof.size(), until);
  std::string reply(5, '\0');
  made.read(reply.data(), reply.size(), until);
  return made;
}

/// What a stranger or a rank sends to the store where ranks meet. The store must answer the
/// next rank all the same.
void run_store(const std::string&, const std::string& input) {
  const std::string token = "token";
  const Deadline until =
      std::chrono::steady_clock::now() + std::chrono::seconds(5);
  const StoreServer server(listen_at(resolve("127.0.0.1", 0).at(0)),
                           {.token = token});
  {
    const bool stranger = choice_of(input, 4) == 0;
    const Socket socket = stranger ? connect_to(server.address(), until)
                                   : rank_connection(server, token, until);
    try {
      socket.write(input.data(), input.size(), until);
    } catch (const Error&) {  // the store has closed the connection
    }
    shutdown(socket.get(), SHUT_WR);
    if (has_sent(socket, until) && stranger &&
        !input.starts_with(detail::kRankMagic)) {
      throw std::logic_error("the store answers a stranger");
    }
  }
  const Socket next = rank_connection(server, token, until);
}

}  // namespace

std::vector<Target> parser_targets() {
  return {
      {.name = "header",
       .file = "fuzz.safetensors",
       .run = run_header,
       .has_safetensors_header = true,
       .corpus = "safetensors"},
      {.name = "study", .file = "fuzz.yaml", .run = run_study},
      {.name = "metrics", .file = "metrics.jsonl", .run = run_metrics},
      {.name = "profile", .file = "", .run = run_profile},
      {.name = "plan", .file = "", .run = run_plan},
      {.name = "summary", .file = "", .run = run_summary},
      {.name = "schedule", .file = "", .run = run_schedule},
      {.name = "bytes", .file = "", .run = run_bytes},
      {.name = "store", .file = "", .run = run_store},
  };
}

}  // namespace reprise::fuzz
