// Runs on two GPUs against the same runs on one, which every rank makes for itself: bf16, five steps, both stacks.
//   mpirun -n 2 ranks_check          losses within 1e-3, slots and token counts equal, the ledger at its prediction
//   mpirun -n 2 ranks_check only "native tensor"  those cases alone
//   mpirun -n 2 ranks_check rows     one rank's experts get more rows than planned: it ends both, with status 3
//   mpirun -n 2 ranks_check die      rank 1 is killed while rank 0 waits for it
//   mpirun -n 2 ranks_check silent   rank 1 never answers: rank 0 gives it up after GDN_RANK_TIMEOUT seconds
#include <cmath>
#include <csignal>
#include <cstring>
#include <functional>
#include <map>
#include <thread>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "config/yaml.h"
#include "config/profiles.h"
#include "core/error.h"
#include "tests/trainer/engine/fixture.h"
#include "trainer/comm/launch.h"
#include "trainer/comm/ranks.h"
#include "trainer/cuda/device.h"
#include "trainer/prediction.h"

using namespace gdn;
using namespace gdn::trainer;
using config::LayerKind;
using config::MlpKind;
using config::Parallel;

namespace {

constexpr int kSkip = 77, kSteps = 5;
constexpr double kLossTolerance = 1e-3;

// The 35B's layers on a small scale: heads 128 and 256 wide, the fast path of both kernels.
config::Model model(bool experts, LayerKind first = LayerKind::Gdn) {
  const MlpKind mlp = experts ? MlpKind::Moe : MlpKind::Dense;
  config::Model m = fixture::model({first, LayerKind::Gdn, LayerKind::Gdn, LayerKind::Attention}, {mlp, mlp, mlp, mlp});
  m.hidden = 256;
  m.vocab = 512;
  m.gdn.key_heads = 4;
  m.gdn.value_heads = 8;
  m.gdn.key_head_dim = m.gdn.value_head_dim = 128;
  m.attention.heads = 4;
  m.attention.kv_heads = 2;
  m.attention.head_dim = 256;
  m.attention.rotary_fraction = 0.25;
  m.moe.experts = 8;
  m.moe.top_k = 2;
  m.moe.ffn = m.moe.shared_ffn = 128;
  m.moe.aux_loss_coeff = 0.01;
  m.moe.z_loss_coeff = 0.001;
  m.ffn = 512;
  return m;
}

struct Case {
  std::string name;
  Parallel parallel = {};
  bool experts = true;
  std::string cp_comm_type = "all_gather";
  bool packed = false; // documents of several lengths in one sequence
  std::vector<std::string> modules = {};
  LayerKind first = LayerKind::Gdn; // of the first layer
};

config::Run run_of(const std::string& stack, const Case& c) {
  config::Run r = fixture::run(4);
  r.seq = 256;
  r.stack = stack;
  r.vocab_divisor = 0;  // the vocabulary is padded to the same size in every layout
  r.moe_imbalance = 2;  // no more can arrive with two expert ranks
  r.cp_comm_type = c.cp_comm_type;
  r.settings.packed = c.packed;
  r.parallel = c.parallel;
  return r;
}

struct Step {
  StepResult result;
  double norm = 0;
};

std::vector<Step> train(Session& session, const config::Run& whole, const Case& c) {
  const Ranks& ranks = session.ranks();
  session.parameters().initialise(7);
  std::vector<Step> steps;
  for (int i = 0; i < kSteps; ++i) {
    std::vector<Batch> all = fixture::batches(session.model(), whole, static_cast<std::uint64_t>(i) + 1), mine;
    if (c.packed)
      for (Batch& b : all) b.sequences = {0, 37, 101, 128, 256};
    for (size_t m = static_cast<size_t>(ranks.place().dp); m < all.size(); m += static_cast<size_t>(ranks.topology().parallel().dp())) mine.push_back(all[m]);
    Step s{session.run(mine, static_cast<std::uint64_t>(i), 7)};
    UpdateSettings u;
    u.lr = 1e-4;
    u.clip = 1;
    u.step = i + 1;
    s.norm = session.parameters().update(u);
    steps.push_back(std::move(s));
  }
  return steps;
}

int failures = 0;

void check(const std::string& stack, const Case& c, Device& device, World& world) {
  const config::Run run = run_of(stack, c);
  config::Run alone = run;
  alone.parallel = {};
  const config::Model m = model(c.experts, c.first);
  static std::map<std::string, std::vector<Step>> made;
  std::vector<Step>& expected = made[fmt::format("{} {} {} {}", stack, c.experts, c.packed, static_cast<int>(c.first))];
  if (expected.empty()) {
    Session one(m, alone, device);
    one.use(fixture::modules({}), Checks{.poison = false});
    expected = train(one, alone, c);
  }
  const Ranks ranks(world, run.parallel);
  auto on_all = [&](bool poison) { // guard bands around all that is exchanged
    Session many(m, run, device, std::numeric_limits<Bytes>::max(), nullptr, &ranks);
    many.use(fixture::modules(c.modules), Checks{.poison = poison});
    return std::pair(train(many, alone, c), predict(many.workload(), fixture::modules(c.modules), many.program(), ranks.place().pp));
  };
  const auto [actual, predicted] = on_all(true);
  const std::vector<Step> again = on_all(false).first;
  double worst = 0, worst_norm = 0;
  const double at_first = std::abs(actual.front().result.loss - expected.front().result.loss);
  bool right = true, repeats = true;
  for (size_t i = 0; i < expected.size(); ++i) {
    const Step &e = expected[i], &a = actual[i];
    worst = std::max({worst, std::abs(a.result.loss - e.result.loss), std::abs(a.result.aux_loss - e.result.aux_loss)});
    worst_norm = std::max(worst_norm, std::abs(a.norm / e.norm - 1));
    right &= a.result.valid == e.result.valid && a.result.tokens == e.result.tokens && a.result.peak.bytes == predicted.peak_bytes && a.result.peak.by == predicted.at_peak;
    std::int64_t slots = 0, expected_slots = 0;
    for (std::int64_t n : a.result.expert_load) slots += n;
    for (std::int64_t n : e.result.expert_load) expected_slots += n;
    right &= slots == expected_slots;
    repeats &= a.result.loss == again[i].result.loss && a.norm == again[i].norm;
  }
  right &= worst < kLossTolerance && repeats; // false for NaN
  failures += !right;
  if (world.rank() == 0)
    fmt::print("{:8} {:28} loss {:.6f} to {:.6f}, off by {:.1e} at first and at most {:.1e}; gradient norms by {:.1e}; peak {} bytes{}: {}\n", stack, c.name,
               expected.front().result.loss, expected.back().result.loss, at_first, worst, worst_norm, predicted.peak_bytes, repeats ? "" : ", NOT REPEATED", right ? "right" : "FAILED");
  std::fflush(stdout);
}

// What all ranks find wrong with one case is no reason to leave the others out.
void check_or_tell(const std::string& stack, const Case& c, Device& device, World& world) {
  try {
    check(stack, c, device, world);
  } catch (const Error& e) {
    ++failures;
    fmt::print("{:8} {:28} rank {}: {}: FAILED\n", stack, c.name, world.rank(), e.what());
    std::fflush(stdout);
    if (e.code() == ErrorCode::Nccl || e.code() == ErrorCode::Cuda) throw;
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  auto add = [&](const char* name, const std::function<void(Parallel&)>& sizes) -> Case& {
    Case& c = all.emplace_back();
    c.name = name;
    c.parallel.gpus = 2;
    sizes(c.parallel);
    return c;
  };
  auto tensor = [](Parallel& p) { p.tp = 2; };
  auto sequence = [](Parallel& p) { p.tp = 2, p.sequence_parallel = true; };
  auto expert = [](Parallel& p) { p.ep = 2; };
  auto context = [](Parallel& p) { p.cp = 2; };
  add("data parallel", [](Parallel&) {});
  add("expert parallel", expert);
  add("expert parallel, recompute", expert).modules = {"moe"};
  add("expert tensor parallel", [](Parallel& p) { p.etp = 2; });
  add("tensor parallel, dense", tensor).experts = false;
  add("tensor + sequence, dense", sequence).experts = false;
  add("tensor + sequence", [&](Parallel& p) { sequence(p), p.etp = 2; });
  add("tensor + sequence, expert", [&](Parallel& p) { sequence(p), p.ep = 2; });
  add("context, all-gather", context);
  add("context, all-to-all", context).cp_comm_type = "a2a";
  add("context, packed", context).packed = true;
  add("tensor + sequence, GDN2", [&](Parallel& p) { sequence(p), p.etp = 2; }).first = LayerKind::Gdn2;
  add("context, GDN2", context).first = LayerKind::Gdn2;
  add("pipeline", [](Parallel& p) { p.pp = 2; });
  return all;
}

int fail(const char* how, Device& device, World& world) {
  Case c;
  c.parallel.ep = c.parallel.gpus = 2;
  config::Run run = run_of("native", c);
  if (std::strcmp(how, "rows") == 0) run.moe_imbalance = 1; // a router is never that even
  const Ranks ranks(world, run.parallel);
  Session session(model(true), run, device, std::numeric_limits<Bytes>::max(), nullptr, &ranks);
  session.use(fixture::modules({}));
  session.parameters().initialise(7);
  const std::vector<Batch> batches = fixture::batches(session.model(), run, static_cast<std::uint64_t>(world.rank()));
  session.run(batches);
  if (world.rank() == 1 && std::strcmp(how, "die") == 0) std::raise(SIGKILL);
  if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(60));
  session.parameters().reduce_gradients();
  device.synchronise();
  session.parameters().reduce_gradients();
  return 0;
}

} // namespace

int main(int argc, char** argv) {
  int gpus = 0;
  const bool found = cudaGetDeviceCount(&gpus) == cudaSuccess;
  cudaGetLastError();
  if (!found || gpus < 2) {
    fmt::print("two GPUs are needed, {} found\n", found ? gpus : 0);
    return kSkip;
  }
  if (launched_ranks() != 2) {
    fmt::print("start it with mpirun -n 2\n");
    return 2;
  }
  return run_ranks([&](World& host) {
    CudaDevice device;
    const std::unique_ptr<World> world = device.connect(host);
    if (argc > 1 && std::isalpha(argv[1][0]) && std::strcmp(argv[1], "only") != 0) return fail(argv[1], device, *world);
    for (const char* stack : {"megatron", "native"})
      for (const Case& c : cases())
        if (argc < 3 || (stack + (" " + c.name)).find(argv[2]) != std::string::npos) check_or_tell(stack, c, device, *world);
    if (world->rank() == 0) fmt::print("{}\n", failures == 0 ? "all right" : "FAILURES");
    return failures == 0 ? 0 : 1;
  });
}
