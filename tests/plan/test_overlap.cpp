#include <doctest/doctest.h>

#include <cmath>

#include "config/profiles.h"
#include "cost/overlap.h"
#include "cost/pipeline.h"
#include "kernels/describe/own.h"
#include "plan/data_parallel.h"
#include "plan/estimate.h"
#include "plan/search.h"
#include "plan/workload.h"
#include "tests/plan/published.h"

using namespace gdn;
using doctest::Approx;

// What runs beside what, by hand; then on whole steps: what each option of Megatron-LM takes off the clock.

TEST_CASE("in pieces: all of the transfer but one piece of compute hides, or the transfer decides") {
  CHECK(cost::in_pieces(8, 2, 4) == Approx(8));      // 2 beside the last 6
  CHECK(cost::in_pieces(8, 7, 4) == Approx(9));      // first piece 2, then 7
  CHECK(cost::in_pieces(8, 7, 1) == Approx(15));
}

TEST_CASE("gradients behind the backward: what the last pieces cannot hide") {
  CHECK(cost::left_behind({1, 1, 1}, {1, 1, 1}) == Approx(1));
  CHECK(cost::left_behind({1, 1, 1}, {0, 3, 1}) == Approx(3)); // ready at 2, until 5, then 6, against 3
  CHECK(cost::left_behind({5, 5}, {2, 0}) == Approx(0));
  CHECK(cost::left_behind({}, {}) == Approx(0));
}

TEST_CASE("parameters ahead of the forward: the first waits, later ones only if their transfer is late") {
  CHECK(cost::waited_for({2, 2, 2}, {1, 1, 1}) == Approx(1));
  CHECK(cost::waited_for({1, 1}, {1, 3}) == Approx(3)); // the second begins at 4, not at 1
}

TEST_CASE("a forward beside a backward: each exchange hides behind the other micro-batch") {
  cost::ExpertPasses p;
  p.mixer = 4, p.dispatch = 2, p.experts = 4, p.combine = 2, p.behind = 1;
  p.behind_backward = 1, p.combine_backward = 2, p.experts_backward = 4, p.experts_wgrad = 4, p.dispatch_backward = 2, p.mixer_backward = 8;
  CHECK(p.forward() == Approx(13));
  CHECK(p.backward() == Approx(21));
  // 1 | 4 beside 2 | 4 + 4 beside 2 | 4 beside 2 | 8 beside 2 | 1: compute alone.
  CHECK(cost::side_by_side(p, p, false) == Approx(26));
  // The first exchange takes 9: the mixer's 4 hide 4 of it; the rest waits.
  p.combine_backward = 9;
  CHECK(cost::side_by_side(p, p, false) == Approx(31));
  p.combine_backward = 2;
  // Dispatches of 6: forward from 5 to 11 beside 8 of compute (to 13), backward from 13 to 19 beside 4 (to 17): 2 are left.
  p.dispatch = p.dispatch_backward = 6;
  CHECK(cost::side_by_side(p, p, false) == Approx(28));
  // Weight gradients held back: the forward's experts wait for its rows (at 11 they are there: 9, then 13); the
  // backward's exchange runs from 11 to 17, behind compute until 17.
  CHECK(cost::side_by_side(p, p, true) == Approx(26));
}

TEST_CASE("pipeline: transfers beside compute or not, two stages, two micro-batches") {
  const std::vector<std::vector<program::Slot>> slots{program::one_f_one_b(2, 0, 1, 2), program::one_f_one_b(2, 1, 1, 2)};
  const std::vector<std::vector<Seconds>> forward{{1}, {1}}, backward{{2}, {2}};
  const cost::PipelineTime beside = cost::simulate_pipeline(slots, forward, backward, {.transfer = 0.5, .beside = true});
  CHECK(beside.total == Approx(10));
  CHECK(beside.ends[1] == Approx(7.5));
  const cost::PipelineTime waiting = cost::simulate_pipeline(slots, forward, backward, {.transfer = 0.5, .beside = false});
  CHECK(waiting.total == Approx(10.5));
  CHECK(waiting.ends[1] == Approx(8));
}

TEST_CASE("pairs: one forward runs ahead, each later one beside the backward before it") {
  const std::vector<program::Slot> slots = program::one_f_one_b(1, 0, 1, 3, 0, 1);
  const std::vector<std::pair<program::Pass, int>> wanted{{program::Pass::Forward, 0}, {program::Pass::Forward, 1}, {program::Pass::Backward, 0},
                                                          {program::Pass::Forward, 2}, {program::Pass::Backward, 1}, {program::Pass::Backward, 2}};
  REQUIRE(slots.size() == wanted.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    CHECK(slots[i].pass == wanted[i].first);
    CHECK(slots[i].micro_batch == wanted[i].second);
  }
  // 2, then twice 2 + 4 less 1, then 4.
  CHECK(cost::simulate_pipeline({slots}, {{2}}, {{4}}, {.saved = {{{1}}}}).total == Approx(16));
  CHECK(cost::simulate_pipeline({slots}, {{2}}, {{4}}, {}).total == Approx(18));
}

// Two stages, two micro-batches. The first stage has warmed up with both forwards and pairs none; the last one runs
// its second forward (at 2) beside its first backward, until 2 + 1 + 2 - 0.5; then 2 more, and 2 on the first stage.
TEST_CASE("pairs: none where the warm-up takes every forward") {
  const std::vector<std::vector<program::Slot>> slots{program::one_f_one_b(2, 0, 1, 2, 0, 1), program::one_f_one_b(2, 1, 1, 2, 0, 1)};
  const cost::PipelineTime t = cost::simulate_pipeline(slots, {{1}, {1}}, {{2}, {2}}, {.saved = {{{0.5}}, {{0.5}}}});
  CHECK(t.ends[1] == Approx(6.5));
  CHECK(t.total == Approx(8.5));
}

TEST_CASE("pairs: every legal schedule of up to five stages and chunks ends") {
  for (int pp = 1; pp <= 5; ++pp)
    for (int vp = 1; vp <= (pp > 1 ? 5 : 1); ++vp)
      for (int m = 1; m <= 3 * pp; ++m) {
        if (vp > 1 && m % pp != 0) continue;
        CAPTURE(pp);
        CAPTURE(vp);
        CAPTURE(m);
        const size_t chunks = static_cast<size_t>(vp), ranks = static_cast<size_t>(pp);
        std::vector<std::vector<program::Slot>> slots;
        for (int r = 0; r < pp; ++r) slots.push_back(program::one_f_one_b(pp, r, vp, m, 0, 1));
        const std::vector<std::vector<Seconds>> forward(ranks, std::vector<Seconds>(chunks, 1)), backward(ranks, std::vector<Seconds>(chunks, 2));
        const std::vector<std::vector<Seconds>> saved(chunks, std::vector<Seconds>(chunks, 0.5));
        const Seconds total = cost::simulate_pipeline(slots, forward, backward, {.saved = std::vector(ranks, saved)}).total;
        CHECK(total >= 2.5 * m * vp);
      }
}

// Buckets by hand: DistributedDataParallel of Megatron-LM, whose training script sizes them by DP x CP.
TEST_CASE("buckets: of 40 M elements or 1 M a rank, in the first chunk of the first stage; else one a chunk") {
  const config::Hardware h100 = config::Profiles().hardware("h100");
  auto left = [&](const config::Parallel& parallel, std::int64_t rank, const std::vector<plan::UnitState>& units) {
    config::Run run;
    run.parallel = parallel;
    run.overlap.gradients = true;
    model::StaticState state;
    for (const plan::UnitState& u : units) {
      state.dense.gradients += 4 * u.dense;
      state.expert.gradients += 4 * u.expert;
    }
    const cost::CostModel cost(h100, "upstream", parallel, DType::BF16);
    return plan::data_parallel_time(cost, run, state, rank, units).reduced;
  };
  auto scatter = [&](const config::Parallel& parallel, model::Group group, std::int64_t ranks, Bytes bytes) {
    return cost::CostModel(h100, "upstream", parallel, DType::BF16).seconds(model::Collective{model::CollectiveKind::ReduceScatter, group, ranks, bytes});
  };
  auto dense = [](std::int64_t chunk, std::int64_t elements) { return plan::UnitState{chunk, elements, 0, 1, 1}; };
  const config::Parallel p{.gpus = 8}, wide{.ep = 8, .gpus = 64};
  auto one = [&](Bytes elements) { return scatter(p, model::Group::Dp, 8, 4 * elements); };
  // Four buckets, of which the last one has nothing beside it; on a later stage one, behind everything.
  const std::vector<plan::UnitState> four(4, dense(0, 40'000'000));
  CHECK(left(p, 0, four) == Approx(one(40'000'000)).scale(0));
  CHECK(left(p, 1, four) == Approx(one(160'000'000)).scale(0));
  // 30 M a chunk: a bucket each, though they would fill one.
  CHECK(left(p, 0, {dense(0, 30'000'000), dense(1, 30'000'000)}) == Approx(one(30'000'000)).scale(0));
  // Eight data-parallel ranks of experts among 64: 50 M do not close a bucket.
  const std::vector<plan::UnitState> experts(2, plan::UnitState{0, 0, 50'000'000, 1, 1});
  CHECK(left(wide, 0, experts) == Approx(scatter(wide, model::Group::Edp, 8, 400'000'000)).scale(0));
}

// 4 x 8 B200, all-reduce of 16 GiB: 381.8 GB/s of bus bandwidth (stas00 ml-engineering 744d01e), twice 31/32 of the
// bytes over the time. Its rings enter a node once for eight ranks.
TEST_CASE("collectives over several nodes share the network of the ranks in a node") {
  const config::Hardware b200 = config::Profiles().hardware("b200");
  const cost::CostModel cost(b200, "upstream", config::Parallel{.gpus = 32}, DType::BF16);
  const Bytes bytes = Bytes{16} << 30;
  const Seconds measured = 2.0 * 31 / 32 * static_cast<double>(bytes) / 381.8e9;
  CHECK(std::fabs(cost.seconds({model::CollectiveKind::AllReduce, model::Group::Dp, 32, bytes}) / measured - 1) < 0.10);
  // One rank a node: nobody shares. By hand: 31/32 of the bytes at 0.8 of 50 GB/s.
  const cost::CostModel apart(b200, "upstream", config::Parallel{.tp = 8, .gpus = 256}, DType::BF16);
  CHECK(apart.seconds({model::CollectiveKind::AllGather, model::Group::Dp, 32, bytes}) == Approx(31.0 / 32 * static_cast<double>(bytes) / 40e9).scale(0).epsilon(1e-3));
  // Rows for 24 of 32 ranks cross; of an exchange in one node, none.
  CHECK(cost.seconds({model::CollectiveKind::AllToAll, model::Group::Ep, 32, bytes}) == Approx(24.0 / 32 * static_cast<double>(bytes) / 40e9).scale(0).epsilon(1e-3));
}

namespace {

plan::Estimate step(const char* model, const char* hardware, const std::vector<config::Setting>& settings) {
  const config::ModelProfile p = config::Profiles().model(model, settings);
  const config::Hardware h = config::Profiles().hardware(hardware);
  return plan::Estimator(p.model, p.run, h).evaluate(plan::Setting::of(p.run));
}
// What exchanges of the layers and ends take in a step of one pipeline stage when nothing hides them.
Seconds exchanges(const char* model, const char* hardware, const std::vector<config::Setting>& settings) {
  const config::ModelProfile p = config::Profiles().model(model, settings);
  const config::Hardware h = config::Profiles().hardware(hardware);
  plan::Workload workload(p.model, p.run, kernels::provider_of(p.run.stack));
  const cost::CostModel cost(h, std::string(workload.provider().name()), p.run.parallel, p.run.dtype);
  Seconds sum = 0;
  for (const model::Chunk& c : model::pipeline_chunks(p.model.layers(), p.run.parallel))
    for (const plan::PlacedUnit& u : workload.units(c, plan::Setting::of(p.run))) sum += cost.time(u.unit->trace, workload.provider()).communication;
  return sum * static_cast<double>(p.run.micro_batches());
}
using Settings = std::vector<config::Setting>;
Settings operator+(Settings a, const Settings& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

} // namespace

// One forward before, one backward behind, and in between pairs that take less than both: by the passes of its layers.
TEST_CASE("expert-overlap: 64 micro-batches are one forward, 63 pairs and one backward") {
  const config::ModelProfile p = config::Profiles().model(test::source_file("examples/modes/expert-overlap.yaml"), {});
  const config::Hardware h = config::Profiles().hardware(p.hardware);
  plan::Estimator estimator(p.model, p.run, h);
  const plan::Estimate e = estimator.evaluate(plan::Setting::of(p.run));
  const plan::RankEstimate& r = e.ranks[0];
  const Seconds pairs = e.step_seconds - e.reduce_seconds - e.optimizer_seconds - r.forward - r.backward - r.replay;
  CHECK(pairs / 63 < 0.95 * (r.forward + r.backward + r.replay));
  CHECK(pairs / 63 > std::max(r.forward, r.backward));
  CHECK(r.in_flight == 2);
}

TEST_CASE("dense-overlap: of 16 micro-batches' exchanges, those between two gathers and scatters hide") {
  const config::ModelProfile p = config::Profiles().model(test::source_file("examples/modes/dense-overlap.yaml"), {});
  config::ModelProfile serial = p;
  serial.run.overlap = {};
  const config::Hardware h = config::Profiles().hardware(p.hardware);
  const plan::Estimate with = plan::Estimator(p.model, p.run, h).evaluate({}), without = plan::Estimator(serial.model, serial.run, h).evaluate({});
  // Forward, a layer: 64 MiB gathered twice and scattered twice by four ranks, 3/4 of it at 0.8 of 450 GB/s, is 0.14 ms
  // a time; of 20 layers and 16 micro-batches no more than all four, and twice that backward and once for wgrad, hide.
  const Seconds once = 0.75 * 64 * 1048576 / (0.8 * 450e9);
  CHECK(without.step_seconds - with.step_seconds > 0.5 * once * 20 * 16 * 8);
  CHECK(without.step_seconds - with.step_seconds < 1.5 * once * 20 * 16 * 10 + without.reduce_seconds);
  CHECK(with.reduce_seconds < 0.2 * without.reduce_seconds);
}

TEST_CASE("each option takes off the clock what it hides, and never more than that") {
  const Settings tp{{"tensor_model_parallel_size", "4"}, {"sequence_parallel", "true"}, {"pipeline_model_parallel_size", "1"},
                    {"virtual_pipeline_model_parallel_size", "1"}, {"gpus", "32"}, {"global_batch_size", "64"}};
  const plan::Estimate serial = step("llama3-70b", "h100", tp);
  const plan::Estimate tensor = step("llama3-70b", "h100", tp + Settings{{"tp_comm_overlap", "true"}});
  CHECK(tensor.step_seconds < serial.step_seconds);
  CHECK(serial.step_seconds - tensor.step_seconds <= exchanges("llama3-70b", "h100", tp));
  CHECK(tensor.peak_bytes == serial.peak_bytes);
  const plan::Estimate gradients = step("llama3-70b", "h100", tp + Settings{{"overlap_grad_reduce", "true"}});
  const plan::Estimate both = step("llama3-70b", "h100", tp + Settings{{"overlap_grad_reduce", "true"}, {"overlap_param_gather", "true"}});
  CHECK(gradients.step_seconds < serial.step_seconds);
  CHECK(both.step_seconds < gradients.step_seconds);
  CHECK(both.reduce_seconds > 0); // the first bucket gathered and the last one reduced have nothing beside them
  CHECK(both.step_seconds + serial.reduce_seconds >= serial.step_seconds);

  const Settings ep{{"expert_model_parallel_size", "8"}, {"gpus", "8"}, {"global_batch_size", "64"}, {"mtp_num_hidden_layers", "0"}};
  const plan::Estimate alone = step("qwen3.5-35b-a3b", "h200", ep);
  const plan::Estimate shared = step("qwen3.5-35b-a3b", "h200", ep + Settings{{"moe_shared_expert_overlap", "true"}});
  const plan::Estimate beside = step("qwen3.5-35b-a3b", "h200", ep + Settings{{"overlap_moe_expert_parallel_comm", "true"}});
  const plan::Estimate delayed = step("qwen3.5-35b-a3b", "h200", ep + Settings{{"overlap_moe_expert_parallel_comm", "true"}, {"delay_wgrad_compute", "true"}});
  CHECK(shared.step_seconds < alone.step_seconds);
  CHECK(beside.step_seconds < alone.step_seconds);
  CHECK(delayed.step_seconds <= beside.step_seconds);
  const Seconds most = exchanges("qwen3.5-35b-a3b", "h200", ep);
  CHECK(alone.step_seconds - shared.step_seconds <= most);
  CHECK(alone.step_seconds - delayed.step_seconds <= most);
  CHECK(beside.peak_bytes > alone.peak_bytes); // two micro-batches in flight
  CHECK(beside.ranks[0].in_flight == 2);
}

TEST_CASE("parameters gathered ahead cost what they cost beside reduced gradients") {
  const config::Hardware h100 = config::Profiles().hardware("h100");
  auto exchanged = [&](bool gradients, bool parameters) {
    config::ModelProfile p = config::Profiles().model("llama3-70b", Settings{{"gpus", "32"}, {"tensor_model_parallel_size", "4"}, {"sequence_parallel", "true"},
        {"pipeline_model_parallel_size", "1"}, {"virtual_pipeline_model_parallel_size", "1"}, {"global_batch_size", "64"}});
    p.run.overlap.gradients = gradients;
    p.run.overlap.parameters = parameters;
    return plan::Estimator(p.model, p.run, h100).evaluate({}).reduce_seconds;
  };
  CHECK(exchanged(false, true) - exchanged(false, false) == Approx(exchanged(true, true) - exchanged(true, false)).scale(0));
}

// Ten attention layers, there and back, three sends of ten seconds each.
TEST_CASE("ring attention waits for every send") {
  const config::ModelProfile p = config::Profiles().model("qwen3.5-35b-a3b", Settings{{"context_parallel_size", "4"}, {"expert_model_parallel_size", "1"}, {"gpus", "4"},
      {"global_batch_size", "1"}, {"mtp_num_hidden_layers", "0"}});
  config::Hardware h = config::Profiles().hardware("h200");
  std::erase_if(h.collectives, [](const config::CollectiveRow& r) { return r.kind == "p2p"; });
  h.collectives.push_back({.kind = "p2p", .share = 0.8, .latency = 10, .source = "by hand"});
  CHECK(plan::Estimator(p.model, p.run, h).evaluate({}).step_seconds == Approx(600).scale(0).epsilon(0.02));
}

TEST_CASE("a search proposes virtual stages only with whole groups of micro-batches, and prices every layout it proposes") {
  for (const auto& [gpus, batch] : {std::pair{"13", "64"}, {"4", "5"}, {"4", "64"}}) {
    const config::ModelProfile p = config::Profiles().model("qwen3.5-35b-a3b", Settings{{"gpus", gpus}, {"global_batch_size", batch}, {"expert_model_parallel_size", "1"}});
    int interleaved = 0;
    for (const config::Run& r : plan::parallel_points(p.model, p.run, {})) {
      CHECK((r.parallel.vp == 1 || r.micro_batches() % r.parallel.pp == 0));
      interleaved += r.parallel.vp > 1;
    }
    CHECK((interleaved > 0) == (std::string(batch) == "64" && std::string(gpus) == "4"));
  }
  config::ModelProfile p = config::Profiles().model("qwen3.5-35b-a3b", Settings{{"gpus", "4"}, {"global_batch_size", "4"}, {"expert_model_parallel_size", "2"},
      {"overlap_moe_expert_parallel_comm", "true"}, {"mtp_num_hidden_layers", "0"}});
  plan::SearchOptions options;
  options.budget = Bytes{10000} << 30;
  const plan::Search s = plan::search(p.model, p.run, config::Profiles().hardware("h200"), options);
  CHECK(s.counts.illegal == 0);
  CHECK(s.counts.evaluated > 0);
}
