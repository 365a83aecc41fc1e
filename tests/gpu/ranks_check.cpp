// Runs on two GPUs against the same runs on one, which every rank makes for itself: bf16, five steps, both stacks.
//   mpirun -n 2 ranks_check          losses within 1e-3; every gradient, norms and loads of experts within what rounding does; slots
//                                    and token counts equal, the ledger at its prediction
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
#include <fmt/core.h>

#include "config/yaml.h"
#include "config/profiles.h"
#include "core/error.h"
#include "tests/trainer/engine/fixture.h"
#include "tests/trainer/ranks/gradients.h"
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
constexpr double kLossTolerance = 1e-3, kNormTolerance = 2e-3;

// The 35B's layers on a small scale: heads 128 and 256 wide, the fast path of both kernels.
config::Model model(bool experts, LayerKind first = LayerKind::Gdn, std::int64_t kv_heads = 2, bool router_losses = true) {
  const MlpKind mlp = experts ? MlpKind::Moe : MlpKind::Dense;
  config::Model m = fixture::model({first, LayerKind::Gdn, LayerKind::Gdn, LayerKind::Attention}, {mlp, mlp, mlp, mlp});
  m.hidden = 256;
  m.vocab = 512;
  m.gdn.key_heads = 4;
  m.gdn.value_heads = 8;
  m.gdn.key_head_dim = m.gdn.value_head_dim = 128;
  m.attention.heads = 4;
  m.attention.kv_heads = kv_heads;
  m.attention.head_dim = 256;
  m.attention.rotary_fraction = 0.25;
  m.moe.experts = 8;
  m.moe.top_k = 2;
  m.moe.ffn = m.moe.shared_ffn = 128;
  m.moe.aux_loss_coeff = router_losses ? 0.01 : 0;
  m.moe.z_loss_coeff = router_losses ? 0.001 : 0;
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
  std::int64_t kv_heads = 2;
  bool router_losses = true;
  bool distributed_optimizer = true;

  // How far gradients may be from those of one GPU, over their norms. Sums over tensor-parallel ranks are rounded to bf16 before
  // and after, so that the two runs are two roundings of one gradient. What rounding alone does, bf16 from fp32 on one rank with
  // this model and these tokens (CPU, the larger of both stacks): with experts, as near ties send slots to another expert, 0.22 of
  // a router's gradient, 0.16 of an expert's, 0.12 of others'; without, 0.062 of A_log's and dt_bias's, which nearly cancel, and
  // 0.025 of others'. Twice that is allowed; a sum that lacks a rank is off by about 0.5 or more. Of context ranks, whose parts of
  // dK and dV are rounded once more, two H200 were off by 0.008. Everything else does the same arithmetic, and adds fp32 in another
  // order: 2e-7.
  bool sums_in_bf16() const { return parallel.tp > 1 || parallel.etp > 1; }
  double gradient_bound(const std::string& parameter) const {
    auto is = [&](const char* part) { return parameter.find(part) != std::string::npos; };
    if (!sums_in_bf16()) return parallel.cp > 1 && cp_comm_type == "all_gather" ? 0.025 : 1e-5;
    if (experts) return is(".moe.router") ? 0.44 : is(".moe.experts.") ? 0.32 : 0.24;
    return is(".A_log") || is(".dt_bias") ? 0.124 : 0.05;
  }
  // Of the first step's slots, to another expert: 0.0022 between bf16 and fp32.
  double moved_bound() const { return sums_in_bf16() ? 0.0044 : 0; }
};

config::Run run_of(const std::string& stack, const Case& c) {
  config::Run r = fixture::run(4);
  r.seq = 256;
  r.stack = stack;
  r.vocab_divisor = 0;  // the vocabulary is padded to the same size in every layout
  r.moe_imbalance = 2;  // no more can arrive with two expert ranks
  r.cp_comm_type = c.cp_comm_type;
  r.settings.packed = c.packed;
  r.optimizer.distributed = c.distributed_optimizer;
  r.parallel = c.parallel;
  return r;
}

struct Step {
  StepResult result;
  ranks_test::Gradients gradients = {}; // of the first step
  double norm = 0;
};

// Of the elements whose optimizer state this rank has: all ranks together have every element, and exchange nothing for it.
ranks_test::Gradients owned_gradients(Session& session) {
  ranks_test::Gradients all;
  for (const ParameterSlot& s : session.parameters().slots()) {
    std::vector<float> values(static_cast<size_t>(s.owned));
    session.device().to_host(values.data(), reinterpret_cast<const std::byte*>(s.gradient + s.owned_first), s.owned * 4);
    all.push_back({s.name(), std::move(values)});
  }
  return all;
}

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
    if (i == 0) s.gradients = owned_gradients(session);
    UpdateSettings u;
    u.lr = 1e-4;
    u.clip = 1;
    u.step = i + 1;
    s.norm = session.parameters().update(u);
    steps.push_back(std::move(s));
  }
  return steps;
}

// How far the first step's gradients are: the farthest, and the one nearest to its bound or farthest beyond it.
struct Off {
  double by = 0, of_bound = 0;
  std::string which = {};
};

int failures = 0;

void check(const std::string& stack, const Case& c, Device& device, World& world) {
  const config::Run run = run_of(stack, c);
  config::Run alone = run;
  alone.parallel = {};
  const config::Model m = model(c.experts, c.first, c.kv_heads, c.router_losses);
  static std::map<std::string, std::vector<Step>> made;
  std::vector<Step>& expected = made[fmt::format("{} {} {} {} {} {}", stack, c.experts, c.packed, static_cast<int>(c.first), c.kv_heads, c.router_losses)];
  if (expected.empty()) {
    Session one(m, alone, device);
    one.use(fixture::modules({}), Checks{.poison = false});
    expected = train(one, alone, c);
  }
  const Ranks ranks(world, run.parallel);
  auto on_all = [&](bool poison) { // guard bands around all that is exchanged
    Session many(m, run, device, std::numeric_limits<Bytes>::max(), nullptr, &ranks);
    many.use(fixture::modules(c.modules), Checks{.poison = poison});
    std::vector<Step> steps = train(many, alone, c);
    const Step& whole = expected.front();
    Off off;
    for (const auto& [name, gradient] : steps.front().gradients) {
      const auto of = std::find_if(whole.gradients.begin(), whole.gradients.end(), [&, n = name](const auto& g) { return g.first == n; });
      const ParameterSlot& slot = many.parameters().at(name);
      const auto held = held_stretches(*slot.parameter, run.parallel, ranks.place());
      const double by = of == whole.gradients.end() ? HUGE_VAL
                                                    : ranks_test::distance(gradient, of->second, held, whole.norm, 1e-2, 1e-4, static_cast<size_t>(slot.owned_first));
      const double of_bound = by / c.gradient_bound(name);
      off.by = std::max(off.by, by);
      if (std::isnan(of_bound) || of_bound > off.of_bound) off.of_bound = of_bound, off.which = name; // NaN stays
    }
    return std::tuple(std::move(steps), predict(many.workload(), fixture::modules(c.modules), many.program(), ranks.place().pp), off);
  };
  const auto [actual, predicted, off] = on_all(true);
  const std::vector<Step> again = std::get<0>(on_all(false));
  double worst = 0, worst_norm = 0;
  const double at_first = std::abs(actual.front().result.loss - expected.front().result.loss);
  bool right = true, repeats = true;
  std::int64_t moved = 0, all_slots = 0; // by the first step's routers
  for (size_t i = 0; i < expected.size(); ++i) {
    const Step &e = expected[i], &a = actual[i];
    worst = std::max({worst, std::abs(a.result.loss - e.result.loss), std::abs(a.result.aux_loss - e.result.aux_loss)});
    worst_norm = std::max(worst_norm, std::abs(a.norm / e.norm - 1));
    right &= a.result.valid == e.result.valid && a.result.tokens == e.result.tokens && a.result.peak.bytes == predicted.peak_bytes && a.result.peak.by == predicted.at_peak;
    std::int64_t slots = 0, expected_slots = 0;
    for (std::int64_t n : a.result.expert_load) slots += n;
    for (std::int64_t n : e.result.expert_load) expected_slots += n;
    right &= slots == expected_slots && a.result.expert_load.size() == e.result.expert_load.size();
    if (i == 0 && right)
      for (size_t x = 0; x < a.result.expert_load.size(); ++x) moved += std::abs(a.result.expert_load[x] - e.result.expert_load[x]);
    if (i == 0) all_slots = expected_slots;
    repeats &= a.result.loss == again[i].result.loss && a.norm == again[i].norm;
  }
  const double moved_share = all_slots > 0 ? static_cast<double>(moved) / 2 / static_cast<double>(all_slots) : 0;
  right &= worst < kLossTolerance && worst_norm < kNormTolerance && off.of_bound <= 1 && moved_share <= c.moved_bound() && repeats; // false for NaN
  failures += !right;
  std::vector<double> offs(static_cast<size_t>(ranks.size()));
  offs[static_cast<size_t>(ranks.rank())] = off.by;
  ranks.world().sum_on_host(offs); // one value of every rank
  if (world.rank() == 0 || !right)
    fmt::print("{:8} {:28} loss {:.6f} to {:.6f}, off by {:.1e} at first and at most {:.1e}; norms by {:.1e}; gradients by {:.1e}, {} at {:.0f} % of its bound; {:.2f} % of slots moved; peak {} bytes{}: {}\n",
               stack, c.name, expected.front().result.loss, expected.back().result.loss, at_first, worst, worst_norm, *std::max_element(offs.begin(), offs.end()), off.which, 100 * off.of_bound,
               100 * moved_share, predicted.peak_bytes, repeats ? "" : ", NOT REPEATED", right ? "right" : "FAILED");
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
  add("data parallel, whole optimizer", [](Parallel&) {}).distributed_optimizer = false;
  add("expert parallel", expert);
  add("expert parallel, recompute", expert).modules = {"moe"};
  add("expert tensor parallel", [](Parallel& p) { p.etp = 2; });
  add("tensor parallel, dense", tensor).experts = false;
  add("tensor + sequence, dense", sequence).experts = false;
  add("tensor + sequence", [&](Parallel& p) { sequence(p), p.etp = 2; });
  add("tensor + sequence, expert", [&](Parallel& p) { sequence(p), p.ep = 2; });
  add("tensor + sequence, unbalanced", [&](Parallel& p) { sequence(p), p.ep = 2; }).router_losses = false;
  add("one key-value head, dense", tensor).experts = false;
  all.back().kv_heads = 1;
  add("one key-value head, experts", [&](Parallel& p) { sequence(p), p.etp = 2; }).kv_heads = 1;
  all.back().distributed_optimizer = false;
  add("context, all-gather", context);
  add("context, all-to-all", context).cp_comm_type = "a2a";
  add("context, packed", context).packed = true;
  add("tensor + sequence, GDN2", [&](Parallel& p) { sequence(p), p.etp = 2; }).first = LayerKind::Gdn2;
  add("context, GDN2", context).first = LayerKind::Gdn2;
  add("pipeline", [](Parallel& p) { p.pp = 2; });
  add("pipeline, interleaved", [](Parallel& p) { p.pp = p.vp = 2; });
  add("pipeline, whole optimizer", [](Parallel& p) { p.pp = 2; }).distributed_optimizer = false;
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
