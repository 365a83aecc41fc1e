#pragma once
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "config/hardware.h"
#include "config/run.h"
#include "cost/overlap.h"
#include "model/provider.h"
#include "program/trace.h"

// Time of ops and collectives from a hardware profile: a roofline per op. Matrix work runs at a share
// of the dense peak, everything else at a share of the nominal bandwidth, by provider, family (or op), pass
// and size.
namespace gdn::cost {

// What the times below rest on and no profile states: printed with every result.
struct Assumption {
  std::string key;  // "efficiency.upstream.gemm.forward"
  std::string text; // "gemm forward: 0.60 of the peak (no measurement in profile 'h100')"
  friend auto operator<=>(const Assumption&, const Assumption&) = default;
};

// Time of one unit's passes for one micro-batch, and what of it is communication.
struct UnitTime {
  Seconds forward = 0, backward = 0, replay = 0; // communication included
  Seconds communication = 0;                     // of all three, what runs beside compute left out
  Seconds doubt = 0;                             // of forward and backward: each op's time times how far it may be off
  Flops forward_flops = 0, backward_flops = 0, replay_flops = 0; // executed
};

// Ranks of a group of `ranks` that lie in one scale-up domain, 1 without a scale-up link. Ranks are laid out tp,
// cp, dp, pp from the inside (megatron-core's order tp-cp-ep-dp-pp): a group spans the product of the sizes inside
// it times its own; beyond the domain it crosses the network.
std::int64_t neighbours(const config::Parallel& parallel, const config::Hardware& hardware, model::Group group, std::int64_t ranks);

class CostModel {
public:
  // `provider`: whose efficiencies ("upstream", "own", "cpu"). A family that the profile lacks for it is
  // borrowed from "upstream", as a named assumption; "upstream" borrows from nobody.
  // `overlap`: what of a layer's communication runs beside its own ops.
  CostModel(const config::Hardware& hardware, std::string provider, const config::Parallel& parallel,
            DType dtype, const config::Overlap& overlap = {});

  // `pass`: "forward", "backward", or a step that profiles measure on its own ("dgrad", "wgrad").
  Seconds seconds(const model::Work& work, std::string_view pass) const;
  Seconds seconds(const model::Collective& collective) const;
  // A transfer of `bytes` to the neighbouring pipeline rank.
  Seconds point_to_point(Bytes bytes) const;
  // `bytes` between device and host, one way.
  Seconds host_link(Bytes bytes) const;
  // Adam of `elements` parameters on the host, its memory the limit; transfers are apart.
  Seconds host_update(std::int64_t elements) const;
  // One event of a trace, its collectives included.
  Seconds seconds(const program::UnitTrace& trace, const program::Event& event, const model::Provider& provider) const;
  // Streaming `bytes` through device memory.
  Seconds stream(Bytes bytes) const;
  // An optimizer step that moves `bytes`: at the share measured for this provider, else as a copy streams.
  Seconds update(Bytes bytes) const;
  UnitTime time(const program::UnitTrace& trace, const model::Provider& provider) const;
  // One decoder layer cut at its exchanges of expert rows.
  ExpertPasses expert_passes(const program::UnitTrace& trace, const model::Provider& provider) const;

  const std::set<Assumption>& assumptions() const { return assumptions_; }
  FlopsPerSecond peak() const { return peak_; }
  // How far a time may be off, as a share of it: by residuals of measured steps whose efficiencies were measured for
  // their provider, borrowed from another one, or defaults.
  double doubt(const model::Work& work, std::string_view pass) const;
  // Families of which ops lie beyond the measured sizes (their nearest point is used).
  std::vector<Assumption> outside_sizes() const;

private:
  struct EventTime {
    Seconds compute = 0, communication = 0; // what of the latter is not beside the former
  };
  EventTime event_time(const model::Op& op, const program::Event& event, const model::Work& work) const;
  double efficiency(const model::Work& work, std::string_view pass) const;
  FlopsPerSecond matrix_rate(int bits) const;   // peak of operands of 4, 8 or 16 bits
  Seconds quantising(Bytes bytes) const;
  bool measured(model::Family family) const; // for this provider, in any pass
  std::int64_t neighbours(model::Group group, std::int64_t ranks) const { return cost::neighbours(parallel_, hardware_, group, ranks); }
  bool inside(model::Group group, std::int64_t ranks) const; // all of them are neighbours
  BytesPerSecond network() const;
  void assume(std::string key, std::string text) const { assumptions_.insert({std::move(key), std::move(text)}); }

  struct Curve {            // efficiency over log(size); one point: constant
    std::vector<std::pair<double, double>> points;
    double doubt = 0;
    double least = 0, most = 0; // sizes asked beyond the points by more than a factor of 2; 0: none
  };
  Curve& curve(const model::Work& work, std::string_view pass) const;
  const config::Hardware& hardware_;
  std::string provider_;
  config::Parallel parallel_;
  config::Overlap overlap_;
  FlopsPerSecond peak_ = 0;
  mutable std::map<std::tuple<model::Family, std::string_view, std::string_view>, Curve> curves_; // by family, op, pass
  mutable std::set<Assumption> assumptions_;
};

} // namespace gdn::cost
