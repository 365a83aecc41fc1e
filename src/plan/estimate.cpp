#include "plan/estimate.h"

#include <algorithm>
#include <map>

#include <fmt/format.h>

#include "core/error.h"
#include "cost/pipeline.h"
#include "kernels/describe/own.h"
#include "model/flops.h"
#include "model/fp8.h"
#include "model/dims.h"
#include "plan/reserved.h"

namespace gdn::plan {

using program::Pass;

namespace {

void require_op_lists(const config::Model& model) {
  if (model.parameters_only)
    throw Error(ErrorCode::Config,
                fmt::format("model '{}' has layers of kind '{}', which have no op list: only its parameters are known",
                            model.name, model.unmodelled_kind),
                "plan a model whose layers are gdn, gdn2 or attention, with moe or mlp");
}

std::string kind_of(const config::Model& model, const PlacedUnit& unit) {
  if (unit.first_layer < 0) return unit.unit->list->input < 0 ? "embedding" : "head";
  const size_t i = static_cast<size_t>(unit.first_layer);
  return fmt::format("{}+{}", name_of(model.mixers[i]), name_of(model.mlps[i]));
}

} // namespace

Estimator::Estimator(const config::Model& model, const config::Run& run, const config::Hardware& hardware,
                     std::optional<Bytes> budget, const model::Provider* provider)
    : model_(model), run_(run), hardware_(hardware), budget_(budget.value_or(hardware.memory)),
      workload_((require_op_lists(model), model), run, provider ? *provider : kernels::provider_of(run.stack)),
      cost_(hardware, std::string(workload_.provider().name()), run.parallel, run.dtype, run.overlap), table_(model::parameter_table(model, run)) {
  const config::Parallel& p = run.parallel;
  const int m = static_cast<int>(run.micro_batches()), pp = static_cast<int>(p.pp), vp = static_cast<int>(p.vp);
  for (int r = 0; r < pp; ++r) {
    Rank rank;
    rank.state = model::static_state(table_, model, run, r);
    rank.chunks = model::chunks_of_rank(model.layers(), p, r);
    rank.slots = program::one_f_one_b(pp, r, vp, m, 0, forwards_ahead(run));
    const int steady = program::steady_micro_batches(pp, vp, m, 0, forwards_ahead(run));
    rank.steady_slots = program::one_f_one_b(pp, r, vp, steady, 0, forwards_ahead(run));
    std::vector<const model::OpList*> lists;
    for (const model::Chunk& c : rank.chunks)
      for (const model::OpList* list : workload_.lists(c)) lists.push_back(list);
    rank.library = model::library_buffers(lists, run);
    if (const Bytes bytes = model::quantised_weights(table_, model, run, r, std::atoi(hardware.sm.c_str())); bytes > 0)
      rank.library.push_back({"quantised weights", "Transformer Engine keeps them for all micro-batches of a step [inferred]", bytes});
    if (run.stack == "megatron")
      for (const config::ReserveRow& row : hardware.reserve_of(workload_.provider().name()))
        if (row.per == "allocator") rank.library.push_back({row.name, row.source, row.bytes});
    for (const model::OpList* list : lists)
      for (model::Misaligned& m : model::misaligned(*list, run))
        if (std::none_of(misaligned_.begin(), misaligned_.end(), [&](const auto& seen) { return seen.op == m.op && seen.what == m.what; }))
          misaligned_.push_back(std::move(m));
    ranks_.push_back(std::move(rank));
  }
  outside_ = outside_rows(model, run, hardware, workload_.provider().name());
  std::vector<OutsideRow> graphs; // of the rank where they take most
  for (const Rank& rank : ranks_) {
    if (run.cuda_graph_impl == "none") break;
    CapturedRank captured{{}, rank.slots};
    for (const model::Chunk& c : rank.chunks) captured.chunks.push_back(workload_.layer_lists(c));
    std::vector<OutsideRow> rows = graph_rows(captured, run, workload_.provider());
    auto total = [](const std::vector<OutsideRow>& r) { Bytes sum = 0; for (const OutsideRow& row : r) sum += row.bytes; return sum; };
    if (total(rows) > total(graphs)) graphs = std::move(rows);
  }
  outside_.insert(outside_.end(), graphs.begin(), graphs.end());
  model_flops_per_token_ = model::model_flops_per_token(model, run.seq, run.train_mtp).forward();
  const model::Dims d = model::Dims::of(model, run);
  boundary_bytes_ = d.tokens_sp * d.hidden * size_of(d.dtype);
}

const cost::UnitTime& Estimator::time_of(const TracedUnit& unit) {
  auto [it, fresh] = times_.try_emplace(&unit);
  if (fresh) it->second = cost_.time(unit.trace, workload_.provider());
  return it->second;
}

std::string Estimator::describe(const PlacedUnit& unit, int event) const {
  const std::string kind = kind_of(model_, unit);
  const std::string what = unit.unit->trace.event_name(event, unit.unit->spans);
  if (unit.first_layer < 0) return fmt::format("{}: {}", kind, what);
  return fmt::format("layer {} ({}): {}", unit.first_layer, kind, what);
}

RankEstimate Estimator::evaluate_rank(const Rank& rank, std::int64_t index, const Setting& setting,
                                      std::vector<Seconds>& forward, std::vector<Seconds>& backward) {
  RankEstimate out;
  out.rank = index;
  out.state = rank.state;
  CategoryBytes base;
  base[Category::Parameters] = rank.state.dense.parameters + rank.state.expert.parameters;
  base[Category::Gradients] = rank.state.dense.gradients + rank.state.expert.gradients;
  base[Category::Optimizer] = rank.state.dense.optimizer + rank.state.expert.optimizer;
  out.library = rank.library;
  for (const model::LibraryBuffer& b : rank.library) base[Category::Workspace] += b.bytes;

  std::vector<std::vector<PlacedUnit>> placed;
  std::vector<std::vector<const program::UnitSummary*>> summaries;
  for (const model::Chunk& c : rank.chunks) {
    placed.push_back(workload_.units(c, setting));
    summaries.emplace_back();
    Seconds f = 0, b = 0;
    Bytes moved = 0;
    for (const PlacedUnit& u : placed.back()) {
      summaries.back().push_back(&u.unit->summary);
      const cost::UnitTime& t = time_of(*u.unit);
      f += t.forward;
      b += t.backward + t.replay;
      out.forward += t.forward;
      out.backward += t.backward;
      out.replay += t.replay;
      out.doubt += t.doubt;
      out.offloaded += u.unit->offloaded;
      moved += u.unit->offloaded;
      out.hardware_flops += t.forward_flops + t.backward_flops + t.replay_flops;
      out.retained_per_micro_batch += u.unit->summary.retained.total();
    }
    out.layers += c.layers;
    const Seconds link = cost_.host_link(moved); // beside the compute; what is longer decides
    out.offload_seconds += link;
    forward.push_back(std::max(f, link));
    backward.push_back(std::max(b, link));
  }
  const program::Walk walk = program::walk(summaries, rank.steady_slots, base);
  out.peak = walk.overall;
  auto phase_of = [&](const program::StepPeak& peak) -> std::string {
    const program::Slot& s = rank.steady_slots[static_cast<size_t>(peak.slot)];
    const PlacedUnit& u = placed[static_cast<size_t>(s.chunk)][static_cast<size_t>(peak.unit)];
    if (u.first_layer < 0 && u.unit->list->output < 0) return "loss";
    return std::string(program::name_of(peak.pass));
  };
  auto note = [&](const program::StepPeak& peak, Bytes& phase) {
    if (peak.slot < 0) return;
    (phase_of(peak) == "loss" ? out.loss_peak : phase) = std::max(phase_of(peak) == "loss" ? out.loss_peak : phase, peak.bytes);
  };
  note(walk.forward, out.forward_peak);
  note(walk.backward, out.backward_peak);
  note(walk.replay, out.replay_peak);
  out.optimizer_peak = base.total() + walk.end_level;
  const Bytes moments = moment_bytes(rank.state);
  if (out.peak.slot < 0) { // no unit: an empty stage passes on what it gets
    out.peak.bytes = base.total();
    out.peak.by = base;
    out.peak_phase = "optimizer";
    out.peak_event = "the rank has no layer";
    out.first_step_peak = out.peak.bytes - moments;
    out.host_bytes = rank.state.host;
    return out;
  }

  const program::Slot& slot = rank.steady_slots[static_cast<size_t>(out.peak.slot)];
  const PlacedUnit& unit = placed[static_cast<size_t>(slot.chunk)][static_cast<size_t>(out.peak.unit)];
  out.peak_phase = phase_of(out.peak);
  out.peak_event = describe(unit, out.peak.event);
  // The tensors of the peaking unit that are alive at its peak, largest first.
  const program::UnitTrace& t = unit.unit->trace;
  for (size_t i = 0; i < t.buffers.size(); ++i) {
    const program::Buffer& b = t.buffers[i];
    const bool discarded = b.drop >= 0 && out.peak.event > b.drop && (b.refill < 0 || out.peak.event < b.refill);
    if (b.alloc <= out.peak.event && b.last >= out.peak.event && !discarded)
      out.largest.push_back({t.buffer_name(static_cast<program::BufferId>(i)), b.bytes});
  }
  if (Bytes scratch = t.events[static_cast<size_t>(out.peak.event)].scratch) out.largest.push_back({"(scratch)", scratch});
  std::stable_sort(out.largest.begin(), out.largest.end(), [](auto& a, auto& b) { return a.second > b.second; });
  if (out.largest.size() > 3) out.largest.resize(3);

  std::int64_t now = 0;
  for (const program::Slot& s : rank.steady_slots) {
    now += s.pass == Pass::Forward ? 1 : -1;
    out.in_flight = std::max(out.in_flight, now);
  }
  out.host_bytes = rank.state.host + out.offloaded * out.in_flight / static_cast<std::int64_t>(rank.chunks.size());
  out.first_step_peak = out.peak.bytes - moments;
  return out;
}

// Adam's two moments: what the first update allocates.
Bytes Estimator::moment_bytes(const model::StaticState& state) const {
  const model::ElementBytes e = model::element_bytes(run_, run_.dtype);
  const Bytes moments = run_.optimizer.precision_aware
                            ? size_of(run_.optimizer.moment1_dtype) + size_of(run_.optimizer.moment2_dtype) : 8;
  return e.optimizer > 0 ? (state.dense.optimizer + state.expert.optimizer) / e.optimizer * moments : 0;
}

Seconds update_seconds(const cost::CostModel& cost, const model::Provider& provider, const config::Run& run, const model::StaticState& state) {
  auto seconds = [&](const model::StateBytes& s, std::int64_t ranks) {
    const std::int64_t shards = run.optimizer.distributed ? ranks : 1;
    const Seconds offloaded = cost.host_link(static_cast<Bytes>(run.optimizer.offload_fraction * static_cast<double>((s.gradients + s.parameters) / shards)));
    const auto elements = static_cast<std::int64_t>(run.optimizer.offload_fraction * static_cast<double>(s.gradients / size_of(run.optimizer.gradient_dtype) / shards));
    return cost.update(provider.update_traffic(s, ranks, shards)) + offloaded + cost.host_update(elements);
  };
  return seconds(state.dense, run.parallel.dp() * run.parallel.cp) + seconds(state.expert, run.parallel.edp());
}

// Units of the rank in model order, each with its weights.
DataParallelTime Estimator::exchanged(const Rank& rank, std::int64_t index, const Setting& setting) {
  std::vector<UnitState> units;
  std::map<std::int64_t, size_t> of_layer;
  size_t first = 0, last = 0;
  if (run_.overlap.gradients || run_.overlap.parameters) {
    for (size_t chunk = 0; chunk < rank.chunks.size(); ++chunk)
      for (const PlacedUnit& u : workload_.units(rank.chunks[chunk], setting)) {
        const cost::UnitTime& t = time_of(*u.unit);
        for (std::int64_t i = 0; i < u.layers; ++i) of_layer[u.first_layer + i] = units.size();
        units.push_back({static_cast<std::int64_t>(chunk), 0, 0, t.forward, t.backward + t.replay});
      }
    if (units.empty()) return data_parallel_time(cost_, run_, rank.state, index, units); // a stage without layers has no parameters
    last = units.size() - 1;
    for (const model::LocalParameter& p : model::local_parameters(table_, model_, run_, index)) {
      if (!p.parameter->trainable) continue;
      const auto layer = p.parameter->part == model::Part::Text ? of_layer.find(p.parameter->layer) : of_layer.end();
      const size_t unit = layer != of_layer.end() ? layer->second : p.parameter->place == model::Place::First && !p.copy ? first : last;
      (p.parameter->group == model::ParameterGroup::RoutedExpert ? units[unit].expert : units[unit].dense) += p.elements;
    }
  }
  return data_parallel_time(cost_, run_, rank.state, index, units);
}

std::vector<std::vector<Seconds>> Estimator::saved_beside(const Rank& rank, const Setting& setting) {
  std::vector<std::vector<cost::ExpertPasses>> passes;
  for (const model::Chunk& c : rank.chunks) {
    passes.emplace_back();
    for (const PlacedUnit& u : workload_.units(c, setting))
      if (u.first_layer >= 0) passes.back().push_back(cost_.expert_passes(u.unit->trace, workload_.provider()));
  }
  std::vector<std::vector<Seconds>> saved;
  for (const auto& f : passes) {
    saved.emplace_back();
    for (const auto& b : passes) {
      Seconds sum = 0;
      for (size_t i = 0; i < std::min(f.size(), b.size()); ++i) {
        const cost::ExpertPasses& behind = b[b.size() - 1 - i];
        sum += std::max(0.0, f[i].forward() + behind.backward() - cost::side_by_side(f[i], behind, run_.overlap.delayed_wgrad));
      }
      saved.back().push_back(sum);
    }
  }
  return saved;
}

Estimate Estimator::evaluate(const Setting& setting) {
  Estimate e;
  e.setting = setting;
  e.budget_bytes = budget_;
  std::vector<std::vector<Seconds>> forward, backward;
  std::vector<std::vector<program::Slot>> slots;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    forward.emplace_back();
    backward.emplace_back();
    e.ranks.push_back(evaluate_rank(ranks_[r], static_cast<std::int64_t>(r), setting, forward.back(), backward.back()));
    slots.push_back(ranks_[r].slots);
    if (e.ranks[r].peak.bytes > e.ranks[static_cast<size_t>(e.worst)].peak.bytes) e.worst = static_cast<std::int64_t>(r);
  }
  // Memory: the worst rank decides.
  const RankEstimate& worst = e.worst_rank();
  e.peak_bytes = worst.peak.bytes;
  e.categories = worst.peak.by;
  e.outside = outside_;
  Bytes outside = 0;
  for (const OutsideRow& row : outside_) outside += row.bytes;
  e.allocator_bytes = static_cast<Bytes>(static_cast<double>(e.peak_bytes) * hardware_.allocator_reserve);
  e.categories[Category::Context] = outside;
  e.categories[Category::Allocator] = e.allocator_bytes;
  e.total_bytes = e.peak_bytes + outside + e.allocator_bytes;
  e.fits = e.total_bytes <= e.budget_bytes;
  e.tight = e.fits && static_cast<double>(e.total_bytes) > 0.95 * static_cast<double>(e.budget_bytes);

  // Time: the schedule, then gradient reduction and the optimizer of the rank with most state.
  const config::Parallel& p = run_.parallel;
  cost::PipelineOptions options{cost_.point_to_point(boundary_bytes_), run_.overlap.pipeline && p.vp > 1, {}};
  if (run_.overlap_moe_expert_parallel_comm)
    for (const Rank& rank : ranks_) options.saved.push_back(saved_beside(rank, setting));
  const cost::PipelineTime pipeline = cost::simulate_pipeline(slots, forward, backward, options);
  e.bubble = pipeline.bubble();
  Seconds step = 0; // without the update
  const double m = static_cast<double>(run_.micro_batches());
  for (size_t r = 0; r < ranks_.size(); ++r) {
    const model::StaticState& s = ranks_[r].state;
    const DataParallelTime exchange = exchanged(ranks_[r], static_cast<std::int64_t>(r), setting);
    // A rank whose backward ends early reduces early, where nothing waits for all of them.
    step = std::max(step, (run_.overlap.gradients ? pipeline.ends[r] : pipeline.total) + exchange.total());
    e.optimizer_seconds = std::max(e.optimizer_seconds, update_seconds(cost_, workload_.provider(), run_, s));
    e.reduce_seconds = std::max(e.reduce_seconds, exchange.total());
    e.recompute_seconds = std::max(e.recompute_seconds, e.ranks[r].replay * m);
  }
  e.step_seconds = step + e.optimizer_seconds;
  double doubt = 0; // of the rank that is busiest; collectives of the step as those of the layers
  for (const RankEstimate& r : e.ranks)
    if (const Seconds own = r.forward + r.backward + r.replay; own > 0) doubt = std::max(doubt, r.doubt / own);
  e.step_low = e.step_seconds / (1 + doubt);
  e.step_high = e.step_seconds * (1 + doubt);
  const double tokens = static_cast<double>(run_.global_batch * run_.seq), gpus = static_cast<double>(p.gpus);
  e.tokens_per_second = tokens / e.step_seconds;
  e.tokens_per_second_per_gpu = e.tokens_per_second / gpus;
  const Flops model_flops = 3 * model_flops_per_token_ * tokens;
  e.model_tflops_per_gpu = model_flops / e.step_seconds / gpus / 1e12;
  e.mfu = model_flops / e.step_seconds / gpus / cost_.peak();
  Flops hardware = 0;
  for (const RankEstimate& r : e.ranks) hardware += r.hardware_flops * m;
  const double replicas = gpus / static_cast<double>(p.pp);
  e.hfu = hardware * replicas / e.step_seconds / gpus / cost_.peak();
  return e;
}

std::vector<LayerEstimate> Estimator::layers(const Setting& setting) {
  std::vector<LayerEstimate> out;
  for (const model::Chunk& chunk : model::pipeline_chunks(model_.layers(), run_.parallel)) {
    for (const PlacedUnit& u : workload_.units(chunk, setting)) {
      const cost::UnitTime& t = time_of(*u.unit);
      const double share = 1.0 / static_cast<double>(std::max<std::int64_t>(1, u.layers));
      for (std::int64_t i = 0; i < std::max<std::int64_t>(1, u.layers); ++i) {
        PlacedUnit one = u;
        if (u.first_layer >= 0) one.first_layer += i;
        // Under one span over several layers only the first layer's input is kept.
        out.push_back({one.first_layer, kind_of(model_, one), i == 0 ? u.unit->summary.retained.total() : 0,
                       i == 0 ? u.unit->summary.input_bytes : 0, t.forward * share, t.backward * share, t.replay * share});
      }
    }
  }
  return out;
}

std::vector<ReplayCost> Estimator::replay_costs(const Setting& setting) {
  std::vector<ReplayCost> busiest;
  Seconds most = -1;
  for (const Rank& rank : ranks_) {
    std::vector<ReplayCost> costs;
    Seconds sum = 0;
    for (const model::Chunk& chunk : rank.chunks)
      for (const PlacedUnit& u : workload_.units(chunk, setting)) {
        const std::string kind = kind_of(model_, u);
        for (const program::Event& event : u.unit->trace.events) {
          if (event.pass != Pass::Replay) continue;
          const std::string& module = u.unit->spans[static_cast<size_t>(event.span)].name;
          auto it = std::find_if(costs.begin(), costs.end(), [&](const ReplayCost& c) { return c.module == module && c.layer_kind == kind; });
          if (it == costs.end()) it = costs.insert(costs.end(), {module, kind, 0});
          const Seconds seconds = cost_.seconds(u.unit->trace, event, workload_.provider()) * static_cast<double>(run_.micro_batches());
          it->seconds += seconds;
          sum += seconds;
        }
      }
    if (sum > most) {
      most = sum;
      busiest = std::move(costs);
    }
  }
  std::stable_sort(busiest.begin(), busiest.end(), [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
  return busiest;
}

namespace {

// Temporaries and streams that the replay does not see, on top of its highest figure: 19 ranks of 8 B200
// (MooreThreads SimuMax v1.2) lie 0 to 3.5 % above it.
constexpr double kReservedHeadroom = 0.04;
constexpr std::int64_t kQuickOps = 6000; // a step of more is replayed twice, not four times

} // namespace

std::optional<ReservedBand> Estimator::reserved(const Estimate& e, std::int64_t most_ops) {
  if (run_.stack != "megatron") return {};
  ReservedBand band;
  const program::AllocatorOptions options{.expandable_segments = run_.settings.expandable_segments};
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (static_cast<double>(e.ranks[r].peak.bytes) < 0.97 * static_cast<double>(e.peak_bytes)) continue;
    ReservedInput in;
    for (const model::Chunk& c : ranks_[r].chunks) in.chunks.push_back(workload_.units(c, e.setting));
    in.slots = ranks_[r].steady_slots;
    std::int64_t ops = 0;
    for (const auto& chunk : in.chunks)
      for (const PlacedUnit& u : chunk) ops += static_cast<std::int64_t>(u.unit->trace.events.size());
    ops = ops * static_cast<std::int64_t>(in.slots.size()) / 2 / static_cast<std::int64_t>(in.chunks.size());
    if (ops > most_ops) return {};
    in.state = model::state_buffers(table_, model_, run_, static_cast<std::int64_t>(r));
    in.frozen = ranks_[r].state.dense.parameters + ranks_[r].state.expert.parameters;
    for (const model::StateBuffer& b : in.state) in.frozen -= b.elements * model::element_bytes(run_, b.dtype).parameter;
    in.library = ranks_[r].library;
    in.run = &run_;
    const std::int64_t last = run_.parallel.dp() * run_.parallel.cp - 1;
    ReservedSimulation simulation(in, options);
    struct Variant { std::int64_t shard; int delay; };
    for (const Variant v : {Variant{0, 0}, {0, 2}, {0, 1}, {last, 0}}) {
      if (ops > kQuickOps && (v.delay == 1 || (v.shard == last && last > 0))) continue; // a long step: the extremes
      Bytes bytes = 0;
      try {
        bytes = simulation.peak(v.shard, v.delay);
      } catch (const Error& error) { // more than the largest device
        if (error.code() != ErrorCode::DoesNotFit) throw;
        return {};
      }
      if (v.delay == 0) band.low = std::max(band.low, bytes);
      band.high = std::max(band.high, bytes);
    }
  }
  band.high += static_cast<Bytes>(static_cast<double>(band.high) * kReservedHeadroom);
  return band;
}

namespace {

// What runs beside what: all else is added.
std::string overlap_text(const config::Run& run) {
  std::vector<std::string> beside;
  if (run.overlap.tensor) beside.push_back("tensor-parallel exchanges beside the GEMM of their linear");
  if (run.overlap_moe_expert_parallel_comm) beside.push_back("expert exchanges beside another micro-batch");
  if (run.overlap.shared_experts && run.parallel.ep > 1) beside.push_back("expert exchanges beside the shared expert");
  if (run.overlap.gradients) beside.push_back("gradient buckets behind the last backward");
  if (run.overlap.parameters) beside.push_back("parameter buckets ahead of the first forward");
  if (run.parallel.cp > 1 && run.cp_comm_type == "p2p") beside.push_back("the ring of keys and values beside attention");
  if (run.parallel.pp > 1 && run.parallel.vp > 1 && run.overlap.pipeline) beside.push_back("pipeline transfers beside compute");
  if (beside.empty()) return "no overlap of communication with compute";
  return fmt::format("overlap: {}; neither side slows the other down; all other communication is added", fmt::join(beside, ", "));
}

} // namespace

std::vector<cost::Assumption> Estimator::assumptions() const {
  std::vector<cost::Assumption> out(cost_.assumptions().begin(), cost_.assumptions().end());
  for (cost::Assumption& a : cost_.outside_sizes()) out.push_back(std::move(a));
  out.push_back({"allocator", fmt::format("caching allocator: {:.0f} % of allocated held in reserve", hardware_.allocator_reserve * 100)});
  out.push_back({"routing", run_.moe_worst_case ? "worst case: every rank's experts get all rows that can be sent to them"
                            : run_.moe_imbalance == 1 ? "balanced routing: every rank gets the same number of rows"
                                                    : fmt::format("routing imbalance factor {:.2f}", run_.moe_imbalance)});
  auto unpriced = [&](bool set, const char* key) {
    if (set) out.push_back({std::string("unpriced.") + key, fmt::format("{}: checked, not priced; sizes and times are those without it", key)});
  };
  if (model::low_precision(run_)) {
    out.push_back({"low_precision", "fp8 and fp4: quantised inputs and weights of the linears are priced, GEMMs at their own peak with a pass that quantises in front of each"});
    for (const model::Misaligned& m : misaligned_)
      out.push_back({"alignment." + m.op, fmt::format("{}: {} local {} must be a multiple of {} for this recipe", m.op, m.size, m.what, m.multiple)});
  }
  if (run_.settings.packed && run_.documents.empty())
    out.push_back({"unpriced.packed", "packed without document_lengths: priced as one document of seq_length tokens"});
  unpriced(run_.settings.fp32_residual_connection, "fp32_residual_connection");
  unpriced(run_.moe_token_dispatcher != "alltoall", "moe_token_dispatcher_type");
  if (run_.cpu_offloading || run_.fine_grained_offload)
    out.push_back({"offload", "offload: the host link runs beside the compute, and a tensor comes back when its backward reads it"});
  if (run_.optimizer.offload_fraction > 0)
    out.push_back({"optimizer_offload", "optimizer on the host: transfers and the host's Adam come after the device's update"});
  unpriced(run_.distribute_saved_activations, "distribute_saved_activations");
  if (run_.cuda_graph_impl != "none")
    out.push_back({"cuda_graph_impl", "CUDA graphs: their memory is itemised; the launch time that they save is not priced"});
  out.push_back({"overlap", overlap_text(run_)});
  std::sort(out.begin(), out.end());
  return out;
}

} // namespace gdn::plan
