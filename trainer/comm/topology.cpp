#include "trainer/comm/topology.h"

#include <fmt/core.h>

#include "core/error.h"

namespace gdn::trainer {

using model::Group;

Topology::Topology(const config::Parallel& p) : parallel_(p) {
  for (const auto& [what, divisor] : {std::pair("tp x cp x pp", p.tp * p.cp * p.pp), std::pair("ep x etp x pp", p.ep * p.etp * p.pp)})
    if (divisor < 1 || p.gpus % divisor != 0)
      throw Error(ErrorCode::Config, fmt::format("gpus: {} ranks do not divide by {} = {}", p.gpus, what, divisor));
}

Place Topology::place(std::int64_t rank) const {
  const config::Parallel& p = parallel_;
  const std::int64_t stage = p.gpus / p.pp, inside = rank % stage;
  return {.tp = inside % p.tp, .cp = inside / p.tp % p.cp, .dp = inside / (p.tp * p.cp), .pp = rank / stage,
          .etp = inside % p.etp, .ep = inside / p.etp % p.ep, .edp = inside / (p.etp * p.ep)};
}

template <class Same> std::vector<int> Topology::where(Same same) const {
  std::vector<int> out;
  for (int r = 0; r < static_cast<int>(size()); ++r)
    if (same(place(r))) out.push_back(r);
  return out;
}

std::vector<int> Topology::members(std::int64_t rank, Group kind) const {
  const Place me = place(rank);
  return where([&](const Place& o) {
    const bool dense = kind == Group::Tp || kind == Group::Cp || kind == Group::Dp || kind == Group::Pp;
    if (kind != Group::Pp && o.pp != me.pp) return false;
    return dense ? (kind == Group::Tp || o.tp == me.tp) && (kind == Group::Cp || o.cp == me.cp) && (kind == Group::Dp || o.dp == me.dp)
                 : (kind == Group::Etp || o.etp == me.etp) && (kind == Group::Ep || o.ep == me.ep) && (kind == Group::Edp || o.edp == me.edp);
  });
}

std::vector<int> Topology::dense_replicas(std::int64_t rank) const {
  const Place me = place(rank);
  return where([&](const Place& o) { return o.pp == me.pp && o.tp == me.tp; });
}

std::vector<int> Topology::pipeline_ends(std::int64_t rank) const {
  const std::vector<int> all = members(rank, Group::Pp);
  if (all.size() == 1 || (all.front() != rank && all.back() != rank)) return {static_cast<int>(rank)};
  return {all.front(), all.back()};
}

std::int64_t Topology::size_of(Group kind) const {
  const config::Parallel& p = parallel_;
  switch (kind) {
  case Group::Tp: return p.tp;
  case Group::Cp: return p.cp;
  case Group::Ep: return p.ep;
  case Group::Etp: return p.etp;
  case Group::Dp: return p.dp();
  case Group::Edp: return p.edp();
  case Group::Pp: return p.pp;
  }
  return 1;
}

} // namespace gdn::trainer
