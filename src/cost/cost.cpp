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
                     DType dtype)
    : hardware_(hardware), provider_(std::move(provider)), parallel_(parallel) {
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

CostModel::Curve& CostModel::curve(Family family, std::string_view pass) const {
  auto [it, fresh] = curves_.try_emplace({family, pass});
  Curve& curve = it->second;
  if (fresh) {
    const std::string name{model::name_of(family)};
    auto collect = [&](const std::string& provider) {
      for (const std::string& wanted : lookups(pass)) {
        for (const config::EfficiencyRow& r : hardware_.efficiencies)
          if (r.provider == provider && r.family == name && r.pass == wanted)
            curve.points.push_back({r.size.value_or(0), r.value});
        if (!curve.points.empty()) return true;
      }
      return false;
    };
    std::string from;
    // What Megatron's users run is measured far and wide and may stand in; our kernels say nothing about theirs.
    for (const std::string& provider : {provider_, std::string("upstream")})
      if (from.empty() && collect(provider)) from = provider;
    const std::string key = fmt::format("efficiency.{}.{}.{}", provider_, name, pass);
    curve.doubt = from.empty() ? 0.25 : from != provider_ ? 0.15 : 0.05;
    if (from.empty()) {
      curve.points.push_back({0, default_efficiency(family, pass != "forward")});
      assume(key, fmt::format("{} {}: {:.2f} of the {} (no measurement in profile '{}')", name, pass, curve.points[0].second,
                              memory_bound(family) ? "bandwidth" : "dense peak", hardware_.name));
    } else if (from != provider_) {
      assume(key, fmt::format("{} {}: efficiency borrowed from provider '{}'", name, pass, from));
    }
    std::sort(curve.points.begin(), curve.points.end());
  }
  return curve;
}

double CostModel::efficiency(Family family, std::string_view pass, double size) const {
  Curve& c = curve(family, pass);
  if (c.points.size() > 1 && size > 0) {
    if (size < c.points.front().first / 2 && (c.least == 0 || size < c.least)) c.least = size;
    if (size > c.points.back().first * 2 && size > c.most) c.most = size;
  }
  return interpolate(c.points, std::max(size, 1.0));
}

double CostModel::doubt(Family family, std::string_view pass) const {
  return family == Family::None ? 0 : curve(family, pass).doubt;
}

std::vector<Assumption> CostModel::outside_sizes() const {
  std::vector<Assumption> out;
  for (const auto& [key, c] : curves_)
    if (c.least > 0 || c.most > 0)
      out.push_back({fmt::format("sizes.{}.{}", model::name_of(key.first), key.second),
                     fmt::format("{} {}: sizes{}{} lie beyond the measured {:.2g} to {:.2g}", model::name_of(key.first), key.second,
                                 c.least > 0 ? fmt::format(" from {:.2g}", c.least) : "", c.most > 0 ? fmt::format(" up to {:.2g}", c.most) : "",
                                 c.points.front().first, c.points.back().first)});
  return out;
}

Seconds CostModel::seconds(const model::Work& work, std::string_view pass) const {
  if (work.family == Family::None) return 0;
  const double share = efficiency(work.family, pass, work.size);
  const double traffic = static_cast<double>(work.traffic);
  const Seconds t = memory_bound(work.family) ? traffic / (hardware_.bandwidth * share)
                                              : std::max(work.flops / (peak_ * share), stream(work.traffic));
  return t + work.kernels * hardware_.launch_latency;
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

// Ranks are laid out tp, cp, dp, pp from the inside (megatron-core's order tp-cp-ep-dp-pp): a group
// spans the product of the sizes inside it times its own; beyond the scale-up domain it crosses the
// network.
bool CostModel::inside(Group group, std::int64_t ranks) const {
  std::int64_t inner = 1;
  switch (group) {
  case Group::Tp: inner = 1; break;
  case Group::Cp: inner = parallel_.tp; break;
  case Group::Dp: inner = parallel_.tp; break; // with the context-parallel ranks in it
  case Group::Etp: inner = 1; break;
  case Group::Ep: inner = parallel_.etp; break;
  case Group::Edp: inner = parallel_.etp * parallel_.ep; break;
  case Group::Pp: inner = parallel_.gpus / std::max<std::int64_t>(1, parallel_.pp); break;
  }
  return inner * ranks <= hardware_.scale_up_domain && hardware_.scale_up > 0;
}

BytesPerSecond CostModel::link(Group group, std::int64_t ranks) const {
  if (inside(group, ranks)) return hardware_.scale_up;
  if (hardware_.network > 0) return hardware_.network;
  assume("network", fmt::format("profile '{}' names no network: 50 GB/s a GPU", hardware_.name));
  return 50e9;
}

Seconds CostModel::seconds(const model::Collective& c) const {
  if (c.ranks <= 1) return 0;
  const std::string name{model::name_of(c.kind)};
  double share = 0;
  Seconds latency = 0;
  for (const config::CollectiveRow& r : hardware_.collectives)
    if (r.kind == name && r.link == (inside(c.group, c.ranks) ? "scale_up" : "network")) {
      share = r.share;
      latency = r.latency;
    }
  if (share <= 0) {
    share = 0.75; // ring collectives reach 67 to 82 % of the link on A100, H200 and B200 nodes
    latency = 20e-6;
    assume("collective." + name, fmt::format("{}: 0.75 of the link's rate and 20 us (no measurement in profile '{}')",
                                             name, hardware_.name));
  }
  const double n = static_cast<double>(c.ranks);
  double wire = static_cast<double>(c.bytes) * (n - 1) / n; // per rank and direction, ring
  if (c.kind == model::CollectiveKind::AllReduce) wire *= 2;
  if (c.kind == model::CollectiveKind::P2p) wire = static_cast<double>(c.bytes);
  return wire / (link(c.group, c.ranks) * share) + latency;
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

Seconds CostModel::seconds(const program::UnitTrace& t, const program::Event& e, const model::Provider& provider) const {
  const model::Op& op = t.list->ops[static_cast<size_t>(e.op)];
  Seconds total = seconds(provider.work(*t.list, op, e.step), pass_of(op, e.step));
  for (const model::Collective& c : e.step < 0 ? op.collectives : op.steps[static_cast<size_t>(e.step)].collectives) total += seconds(c);
  return total;
}

UnitTime CostModel::time(const program::UnitTrace& t, const model::Provider& provider) const {
  UnitTime out;
  for (const program::Event& e : t.events) {
    const model::Op& op = t.list->ops[static_cast<size_t>(e.op)];
    const model::Work work = provider.work(*t.list, op, e.step);
    const auto& collectives = e.step < 0 ? op.collectives : op.steps[static_cast<size_t>(e.step)].collectives;
    Seconds communication = 0;
    for (const model::Collective& c : collectives) communication += seconds(c);
    const Seconds compute = seconds(work, pass_of(op, e.step)), total = compute + communication;
    out.doubt += compute * doubt(work.family, pass_of(op, e.step)) + communication * 0.15;
    out.communication += communication;
    switch (e.pass) {
    case program::Pass::Forward: out.forward += total; out.forward_flops += work.flops; break;
    case program::Pass::Backward: out.backward += total; out.backward_flops += work.flops; break;
    case program::Pass::Replay: out.replay += total; out.replay_flops += work.flops; break;
    }
  }
  return out;
}

} // namespace gdn::cost
