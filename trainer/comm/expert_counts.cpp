#include "trainer/comm/expert_counts.h"

#include <numeric>

#include <fmt/core.h>

#include "core/error.h"
#include "trainer/comm/communicator.h"

namespace gdn::trainer {

ExpertCounts::ExpertCounts(Communicator& ep, Communicator& etp, std::int64_t local, std::vector<std::int64_t> sent, std::vector<std::int64_t> counts)
    : ep_group_(ep), etp_group_(etp), ep_(ep.size()), etp_(etp.size()), local_(local), sent_(std::move(sent)), counts_(std::move(counts)) {
  if (!counts_.empty()) lay_out();
}

ExpertCounts::ExpertCounts(Communicator& ep, Communicator& etp, std::int64_t local, std::vector<std::int64_t> sent)
    : ExpertCounts(ep, etp, local, std::move(sent), {}) {
  // Sums to which every rank adds its own counts: first those to the experts of all, then those of these experts.
  const auto experts = static_cast<size_t>(ep_ * local_), own = static_cast<size_t>(local_), me = static_cast<size_t>(ep.rank());
  std::vector<double> all(static_cast<size_t>(ep_) * experts), here(static_cast<size_t>(etp_) * experts);
  for (size_t i = 0; i < experts; ++i) all[me * experts + i] = static_cast<double>(sent_[i + 1] - sent_[i]);
  ep.sum_on_host(all);
  for (size_t p = 0; p < static_cast<size_t>(ep_); ++p)
    for (size_t x = 0; x < own; ++x) here[static_cast<size_t>(etp.rank()) * experts + p * own + x] = all[p * experts + me * own + x];
  if (etp_ > 1) etp.sum_on_host(here);
  for (double n : here) counts_.push_back(static_cast<std::int64_t>(n));
  lay_out();
}

void ExpertCounts::lay_out() {
  std::vector<std::int64_t> rows(static_cast<size_t>(local_));
  for (size_t i = 0; i < counts_.size(); ++i) rows[i % rows.size()] += counts_[i];
  groups_ = {0};
  for (std::int64_t n : rows) groups_.push_back(groups_.back() + n);
}

std::int64_t ExpertCounts::rows_from(std::int64_t t) const {
  const auto first = counts_.begin() + t * ep_ * local_;
  return std::accumulate(first, first + ep_ * local_, std::int64_t{0});
}

std::int64_t ExpertCounts::arriving(std::int64_t p) const {
  const auto first = counts_.begin() + (etp_group_.rank() * ep_ + p) * local_;
  return std::accumulate(first, first + local_, std::int64_t{0});
}

void ExpertCounts::require(std::int64_t bound, std::int64_t rank) const {
  if (groups_.back() > bound)
    throw Error(ErrorCode::DoesNotFit, fmt::format("{} routed rows arrive at the experts of rank {}, but {} are planned", groups_.back(), rank, bound),
                "a larger moe_imbalance plans for more; weights are those of the step before");
}

} // namespace gdn::trainer
