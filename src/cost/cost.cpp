#include "cost/cost.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

namespace gdn::cost {

using model::Family;
using model::Group;

namespace {

// Families whose limit is device memory: their efficiency is a share of the achieved bandwidth.
bool memory_bound(Family f) {
  switch (f) {
  case Family::Gemm: case Family::GroupedGemm: case Family::Attention: case Family::Rule: return false;
  default: return true;
  }
}

// Used where a profile has no measurement for any provider; each use is printed. Matrix work: the
// average over layer shapes that SimuMax v1.2 fits on B200; memory: its general share there.
double default_efficiency(Family f, bool backward) {
  switch (f) {
  case Family::Gemm: return 0.60;
  case Family::GroupedGemm: return 0.45;
  case Family::Attention: return backward ? 0.45 : 0.60;
  case Family::Rule: return backward ? 0.08 : 0.10;
  default: return 0.70;
  }
}

// A time and this much of it hold every measured step, by where its efficiencies came from. Measured for the provider:
// 31 steps of Llama3 on B200, 15 of them not fitted to (worst 5.5 %), and every recompute setting of our three proxies
// on H200 (worst 4.7 %). Borrowed: those proxies by upstream's rows (measured is 14 % more). Defaults: the 31 without
// any rows (half more; communication has its own 15 %).
constexpr double kMeasured = 0.075, kBorrowed = 0.15, kDefaulted = 0.68;

// Best shapes of stas00 ml-engineering 744d01e, fp8 over bf16 share: 0.88 on H100, 0.91 on H200, 0.98 on B200.
constexpr double kLowRelative = 0.9;
// fp32 gradient, master and two moments read, the latter three written; no published rate: a node of 16 channels
// of DDR5-4800 has 614 GB/s for 8 GPUs, of which a stream reaches two thirds [inferred].
constexpr std::int64_t kHostAdamBytes = 28;
constexpr BytesPerSecond kHostMemory = 50e9;

double interpolate(const std::vector<std::pair<double, double>>& p, double size) {
  if (p.size() == 1 || size <= p.front().first) return p.front().second;
  if (size >= p.back().first) return p.back().second;
  auto hi = std::upper_bound(p.begin(), p.end(), size, [](double s, const auto& point) { return s < point.first; });
  auto lo = hi - 1;
  double t = (std::log(size) - std::log(lo->first)) / (std::log(hi->first) - std::log(lo->first));
  return lo->second + t * (hi->second - lo->second);
}

} // namespace

CostModel::CostModel(const config::Hardware& hardware, std::string provider, const config::Parallel& parallel,
                     DType dtype, const config::Overlap& overlap)
    : hardware_(hardware), provider_(std::move(provider)), parallel_(parallel), overlap_(overlap) {
  peak_ = hardware.bf16;
  if (dtype == DType::FP32) {
    peak_ = hardware.bf16 / 2; // tf32 units run at half the bf16 rate
    assume("peak.fp32", "fp32 matrix work runs at half the dense bf16 peak (tf32 units)");
  }
  if (hardware.launch_latency <= 0)
    assume("launch_latency", "no kernel launch latency in the profile: launches are free");
}

namespace {

// Where an efficiency is looked up: the pass itself, then what stands in for it.
std::vector<std::string> lookups(std::string_view pass) {
  if (pass == "forward") return {"forward", "any"};
  if (pass == "dgrad") return {"dgrad", "backward", "any", "forward"}; // a GEMM of the forward's shape
  if (pass == "wgrad") return {"wgrad", "backward", "any"};
  return {"backward", "any"};
}

} // namespace

CostModel::Curve& CostModel::curve(const model::Work& work, std::string_view pass) const {
  const Family family = work.family;
  auto [it, fresh] = curves_.try_emplace({family, work.op, pass});
  Curve& curve = it->second;
  if (fresh) {
    const std::string name{model::name_of(family)};
    auto collect = [&](const std::string& provider, std::string_view op) {
      for (const std::string& wanted : lookups(pass)) {
        for (const config::EfficiencyRow& r : hardware_.efficiencies)
          if (r.provider == provider && r.family == name && r.op == op && r.pass == wanted)
            curve.points.push_back({r.size.value_or(0), r.value});
        if (!curve.points.empty()) return true;
      }
      return false;
    };
    std::string from;
    // What Megatron's users run is measured far and wide and may stand in; our kernels say nothing about theirs.
    bool others = false; // the provider's rows are of other ops of the family
    for (const std::string& provider : {provider_, std::string("upstream")}) {
      if (!from.empty()) break;
      if (!work.op.empty() && collect(provider, work.op)) from = provider;
      else if (collect(provider, "")) {
        from = provider;
        others = !work.op.empty() && std::any_of(hardware_.efficiencies.begin(), hardware_.efficiencies.end(), [&](const config::EfficiencyRow& r) {
          return r.provider == provider && r.family == name && !r.op.empty();
        });
      }
    }
    const std::string key = fmt::format("efficiency.{}.{}.{}", provider_, name, pass);
    curve.doubt = from.empty() ? kDefaulted : from != provider_ || others ? kBorrowed : kMeasured;
    if (from.empty()) {
      curve.points.push_back({0, default_efficiency(family, pass != "forward")});
      assume(key, fmt::format("{} {}: {:.2f} of the {} (no measurement in profile '{}')", name, pass, curve.points[0].second,
                              memory_bound(family) ? "bandwidth" : "dense peak", hardware_.name));
    } else if (from != provider_) {
      assume(key, fmt::format("{} {}: efficiency borrowed from provider '{}'", name, pass, from));
    } else if (others) {
      assume(fmt::format("efficiency.{}.{}.{}", provider_, work.op, pass), fmt::format("{} {}: efficiency of other ops of family {} (this one is not measured)", work.op, pass, name));
    }
    std::sort(curve.points.begin(), curve.points.end());
  }
  return curve;
}

double CostModel::efficiency(const model::Work& work, std::string_view pass) const {
  Curve& c = curve(work, pass);
  const double size = work.size;
  if (c.points.size() > 1 && size > 0) {
    if (size < c.points.front().first / 2 && (c.least == 0 || size < c.least)) c.least = size;
    if (size > c.points.back().first * 2 && size > c.most) c.most = size;
  }
  return interpolate(c.points, std::max(size, 1.0));
}

double CostModel::doubt(const model::Work& work, std::string_view pass) const {
  return work.family == Family::None ? 0 : curve(work, pass).doubt;
}

std::vector<Assumption> CostModel::outside_sizes() const {
  std::vector<Assumption> out;
  for (const auto& [key, c] : curves_) {
    const auto& [family, op, pass] = key;
    const std::string_view name = op.empty() ? model::name_of(family) : op;
    if (c.least > 0 || c.most > 0)
      out.push_back({fmt::format("sizes.{}.{}", name, pass),
                     fmt::format("{} {}: sizes{}{} lie beyond the measured {:.2g} to {:.2g}", name, pass, c.least > 0 ? fmt::format(" from {:.2g}", c.least) : "",
                                 c.most > 0 ? fmt::format(" up to {:.2g}", c.most) : "", c.points.front().first, c.points.back().first)});
  }
  return out;
}

Seconds CostModel::seconds(const model::Work& work, std::string_view pass) const {
  if (work.family == Family::None) return 0;
  const double share = efficiency(work, pass);
  const double traffic = static_cast<double>(work.traffic);
  const Seconds t = memory_bound(work.family) ? traffic / (hardware_.bandwidth * share)
                                              : std::max(work.flops / (matrix_rate(work.bits) * share), stream(work.traffic));
  return t + quantising(work.quantising) + work.kernels * hardware_.launch_latency;
}

// In low precision the tensor cores go faster and the rest of a GEMM does not: it reaches a smaller share of the peak.
FlopsPerSecond CostModel::matrix_rate(int bits) const {
  if (bits >= 16) return peak_;
  const FlopsPerSecond peak = bits == 4 ? hardware_.fp4 : hardware_.fp8;
  if (peak <= 0) {
    assume(fmt::format("peak.{}", bits), fmt::format("profile '{}' has no peak of {} bits: its GEMMs take the time of bf16", hardware_.name, bits));
    return peak_;
  }
  if (hardware_.fp8_relative <= 0)
    assume("fp8_relative", fmt::format("low-precision GEMMs reach {:.2f} of the share of the peak that bf16 reaches (not in profile '{}')", kLowRelative, hardware_.name));
  return peak * (hardware_.fp8_relative > 0 ? hardware_.fp8_relative : kLowRelative);
}

Seconds CostModel::quantising(Bytes bytes) const {
  if (bytes == 0) return 0;
  return static_cast<double>(bytes) / (hardware_.bandwidth * efficiency({.family = Family::Elementwise, .size = static_cast<double>(bytes)}, "forward"));
}

Seconds CostModel::host_update(std::int64_t elements) const {
  if (elements == 0) return 0;
  if (hardware_.host_memory <= 0)
    assume("host_memory", fmt::format("Adam on the host moves {} bytes a parameter at {:.0f} GB/s a GPU (no host memory rate in profile '{}')", kHostAdamBytes,
                                      kHostMemory / 1e9, hardware_.name));
  return static_cast<double>(elements * kHostAdamBytes) / (hardware_.host_memory > 0 ? hardware_.host_memory : kHostMemory);
}

Seconds CostModel::stream(Bytes bytes) const {
  const BytesPerSecond bandwidth = hardware_.achieved_bandwidth > 0 ? hardware_.achieved_bandwidth : hardware_.bandwidth;
  return static_cast<double>(bytes) / bandwidth;
}

bool CostModel::measured(Family family) const {
  return std::any_of(hardware_.efficiencies.begin(), hardware_.efficiencies.end(),
                     [&](const config::EfficiencyRow& r) { return r.provider == provider_ && r.family == model::name_of(family); });
}

Seconds CostModel::update(Bytes bytes) const {
  if (!measured(Family::Optimizer)) return stream(bytes);
  return seconds(model::Work{.traffic = bytes, .family = Family::Optimizer, .size = static_cast<double>(bytes), .kernels = 0}, "any");
}

std::int64_t neighbours(const config::Parallel& parallel, const config::Hardware& hardware, Group group, std::int64_t ranks) {
  std::int64_t inner = 1;
  switch (group) {
  case Group::Tp: inner = 1; break;
  case Group::Cp: inner = parallel.tp; break;
  case Group::Dp: inner = parallel.tp; break; // with the context-parallel ranks in it
  case Group::Etp: inner = 1; break;
  case Group::Ep: inner = parallel.etp; break;
  case Group::Edp: inner = parallel.etp * parallel.ep; break;
  case Group::Pp: inner = parallel.gpus / std::max<std::int64_t>(1, parallel.pp); break;
  }
  if (hardware.scale_up <= 0) return 1;
  return std::clamp<std::int64_t>(hardware.scale_up_domain / std::max<std::int64_t>(1, inner), 1, ranks);
}

bool CostModel::inside(Group group, std::int64_t ranks) const { return neighbours(group, ranks) == ranks && hardware_.scale_up > 0; }

BytesPerSecond CostModel::network() const {
  if (hardware_.network > 0) return hardware_.network;
  assume("network", fmt::format("profile '{}' names no network: 50 GB/s a GPU", hardware_.name));
  return 50e9;
}

Seconds CostModel::seconds(const model::Collective& c) const {
  if (c.ranks <= 1) return 0;
  const std::string name{model::name_of(c.kind)};
  double share = 0;
  Seconds latency = 0;
  for (const std::string& provider : {std::string(), provider_}) // the provider's own row, if there is one
    for (const config::CollectiveRow& r : hardware_.collectives)
      if (r.provider == provider && r.kind == name && r.link == (inside(c.group, c.ranks) ? "scale_up" : "network")) {
        share = r.share;
        latency = r.latency;
      }
  if (share <= 0) {
    share = 0.75; // ring collectives reach 67 to 82 % of the link on A100, H200 and B200 nodes
    latency = 20e-6;
    assume("collective." + name, fmt::format("{}: 0.75 of the link's rate and 20 us (no measurement in profile '{}')",
                                             name, hardware_.name));
  }
  const double n = static_cast<double>(c.ranks), d = static_cast<double>(neighbours(c.group, c.ranks)), bytes = static_cast<double>(c.bytes);
  const double twice = c.kind == model::CollectiveKind::AllReduce ? 2 : 1;
  const double whole = c.kind == model::CollectiveKind::P2p ? bytes : twice * bytes * (n - 1) / n; // per rank and direction, ring
  if (d == n) return whole / (hardware_.scale_up * share) + latency;
  // Several domains. Of an all-to-all each rank's rows for other domains cross the network; a ring enters a domain once
  // for all ranks in it, which share what crosses. Both go on inside the domains at the same time.
  const double crossing = c.kind == model::CollectiveKind::P2p        ? bytes
                          : c.kind == model::CollectiveKind::AllToAll ? bytes * (n - d) / n
                                                                      : twice * bytes * (n - d) / (n * d);
  const double within = c.kind == model::CollectiveKind::P2p ? 0 : c.kind == model::CollectiveKind::AllToAll ? bytes * (d - 1) / n : whole;
  Seconds seconds = crossing / (network() * share);
  if (d > 1) seconds = std::max(seconds, within / (hardware_.scale_up * share));
  return seconds + latency;
}

Seconds CostModel::point_to_point(Bytes bytes) const {
  return seconds(model::Collective{model::CollectiveKind::P2p, Group::Pp, parallel_.pp, bytes});
}

namespace {

std::string_view pass_of(const model::Op& op, int step) {
  if (step < 0) return "forward";
  const std::string& name = op.steps[static_cast<size_t>(step)].name;
  return name == "dgrad" ? "dgrad" : name == "wgrad" ? "wgrad" : "backward";
}

} // namespace

Seconds CostModel::host_link(Bytes bytes) const {
  if (bytes == 0) return 0;
  if (hardware_.host_link <= 0) assume("host_link", fmt::format("profile '{}' names no host link: 25 GB/s", hardware_.name));
  return static_cast<double>(bytes) / (hardware_.host_link > 0 ? hardware_.host_link : 25e9);
}

namespace {

// A linear of tensor-parallel ranks whose collective Transformer Engine runs beside a GEMM under tp_comm_overlap.
bool overlapped_linear(const model::Op& op) {
  if (op.kind != model::OpKind::Linear) return false;
  const model::LinearAttr& a = std::get<model::LinearAttr>(op.attr);
  return a.tp > 1 && a.sequence_parallel && a.mode != model::TensorParallel::None;
}

// The gradients of a column-parallel linear: the input's is scattered in one piece beside the weight's GEMM, the
// input is gathered in one piece beside the input gradient's. Everything else goes in as many pieces as ranks.
bool in_bulk(const model::Op& op, int step) {
  return step >= 0 && std::get<model::LinearAttr>(op.attr).mode == model::TensorParallel::Column;
}

} // namespace

CostModel::EventTime CostModel::event_time(const model::Op& op, const program::Event& e, const model::Work& work) const {
  EventTime t{seconds(work, pass_of(op, e.step)), 0};
  for (const model::Collective& c : e.step < 0 ? op.collectives : op.steps[static_cast<size_t>(e.step)].collectives) {
    // Keys and values go round the ring, one send less than ranks, while the block that is there is worked on.
    const bool ring = op.kind == model::OpKind::CoreAttention && c.kind == model::CollectiveKind::P2p;
    const std::int64_t sends = ring ? std::max<std::int64_t>(1, c.ranks - 1) : 1;
    const Seconds transfer = static_cast<double>(sends) * seconds(model::Collective{c.kind, c.group, c.ranks, c.bytes / sends});
    const bool linear = overlap_.tensor && c.group == Group::Tp && overlapped_linear(op);
    if (linear && in_bulk(op, e.step)) t.communication += std::max(0.0, transfer - t.compute);
    else if (ring || linear) t.communication += in_pieces(t.compute, transfer, c.ranks) - t.compute;
    else t.communication += transfer;
  }
  return t;
}

Seconds CostModel::seconds(const program::UnitTrace& t, const program::Event& e, const model::Provider& provider) const {
  const model::Op& op = t.list->ops[static_cast<size_t>(e.op)];
  const EventTime time = event_time(op, e, provider.work(*t.list, op, e.step));
  return time.compute + time.communication;
}

namespace {

// The shared expert on a stream of its own (Megatron-LM, SharedExpertMLP): its first linear beside the dispatch, its
// second beside the combine, and the same backward.
struct SharedExpert {
  Seconds first = 0, second = 0, dispatch = 0, combine = 0;
  void note(const model::Op& op, Seconds compute, Seconds communication) {
    if (op.name == "shared_fc1" || op.name == "shared_act") first += compute;
    if (op.name == "shared_fc2") second += compute;
    if (op.kind == model::OpKind::Dispatch) dispatch += communication;
    if (op.kind == model::OpKind::CombineDispatch) combine += communication;
  }
  Seconds hidden() const { return std::min(first, dispatch) + std::min(second, combine); }
};

} // namespace

UnitTime CostModel::time(const program::UnitTrace& t, const model::Provider& provider) const {
  UnitTime out;
  SharedExpert shared_forward, shared_backward;
  for (const program::Event& e : t.events) {
    const model::Op& op = t.list->ops[static_cast<size_t>(e.op)];
    const model::Work work = provider.work(*t.list, op, e.step);
    const auto [compute, communication] = event_time(op, e, work);
    const Seconds total = compute + communication;
    out.doubt += compute * doubt(work, pass_of(op, e.step)) + communication * 0.15;
    out.communication += communication;
    if (e.pass != program::Pass::Replay) (e.pass == program::Pass::Forward ? shared_forward : shared_backward).note(op, compute, communication);
    switch (e.pass) {
    case program::Pass::Forward: out.forward += total; out.forward_flops += work.flops; break;
    case program::Pass::Backward: out.backward += total; out.backward_flops += work.flops; break;
    case program::Pass::Replay: out.replay += total; out.replay_flops += work.flops; break;
    }
  }
  if (overlap_.shared_experts) {
    out.forward -= shared_forward.hidden();
    out.backward -= shared_backward.hidden();
    out.communication -= shared_forward.hidden() + shared_backward.hidden();
  }
  return out;
}

ExpertPasses CostModel::expert_passes(const program::UnitTrace& t, const model::Provider& provider) const {
  int dispatch = -1, combine = -1;
  for (size_t i = 0; i < t.list->ops.size(); ++i) {
    if (t.list->ops[i].kind == model::OpKind::Dispatch) dispatch = static_cast<int>(i);
    if (t.list->ops[i].kind == model::OpKind::CombineDispatch) combine = static_cast<int>(i);
  }
  ExpertPasses p;
  for (const program::Event& e : t.events) {
    const model::Op& op = t.list->ops[static_cast<size_t>(e.op)];
    const auto [compute, communication] = event_time(op, e, provider.work(*t.list, op, e.step));
    const bool forward = e.pass == program::Pass::Forward, experts = dispatch >= 0 && e.op > dispatch && e.op < combine;
    const bool behind = dispatch >= 0 && e.op >= combine;
    const bool exchange = dispatch >= 0 && e.pass != program::Pass::Replay && (e.op == dispatch || e.op == combine);
    const bool wgrad = op.kind == model::OpKind::GroupedLinear && pass_of(op, e.step) == "wgrad";
    Seconds& worked = forward ? (experts ? p.experts : behind ? p.behind : p.mixer)
                      : experts ? (wgrad ? p.experts_wgrad : p.experts_backward)
                                : behind ? p.behind_backward : p.mixer_backward;
    Seconds& moved = !exchange ? worked : e.op == dispatch ? (forward ? p.dispatch : p.dispatch_backward) : forward ? p.combine : p.combine_backward;
    worked += compute;
    moved += communication;
  }
  return p;
}

} // namespace gdn::cost
