#pragma once
#include "trainer/cuda/collectives.h"

// Rows of a mixture of experts on their way between the ranks that hold tokens and those that hold experts.
namespace gdn::trainer::cuda {

// Who sends how many rows to whom; rows never visit the host, their numbers do, once per dispatch. At home, rows lie by
// expert; at the experts, by local expert, then by the rank they came from. With expert-tensor ranks every one of them
// gets the rows of all, and their results, parts of sums, go back to where each row came from.
class ExpertRoutes {
public:
  // `sent`: first row of every expert at home, and the end. Asks the other ranks for their counts. Together.
  static ExpertRoutes asked(const OpCall& c, Engine& e, std::vector<std::int64_t> sent);
  // As the dispatch of these rows left them in its host table.
  static ExpertRoutes known(const OpCall& c, Engine& e, int dispatch);
  void keep(const OpCall& c) const; // in the host table of this op, a dispatch

  // First row of every local expert at the experts, and the end.
  const std::vector<std::int64_t>& groups() const { return groups_; }
  // Rows of (expert-tensor rank, expert rank, local expert).
  const std::vector<std::int64_t>& counts() const { return counts_; }

  // Throws Error{DoesNotFit} when more rows arrive than `bound`.
  void require(std::int64_t bound) const;
  // home -> experts; rows past the last group become zeros. Together.
  void out(const View& home, const GradView& experts) const;
  // experts -> home, summed over expert-tensor ranks; rows at home that were not sent become zeros. Together.
  void back(const View& experts, const GradView& home) const;

private:
  ExpertRoutes(const OpCall& c, Engine& e);
  void lay_out();
  std::int64_t count(std::int64_t etp, std::int64_t ep, std::int64_t expert) const {
    return counts_[static_cast<size_t>((etp * ep_ + ep) * local_ + expert)];
  }
  std::int64_t rows_from(std::int64_t etp) const; // that arrive by way of an expert-tensor rank
  std::int64_t arriving(std::int64_t ep) const;   // from an expert rank by way of this expert-tensor rank
  // Where rows of all ranks, one rank's after another's, lie at the experts.
  Matrix map(LaunchContext& memory) const;

  const OpCall& call_;
  Engine& engine_;
  Communicator *ep_group_, *etp_group_;
  std::int64_t ep_, etp_, local_;
  std::vector<std::int64_t> sent_, counts_, groups_;
};

} // namespace gdn::trainer::cuda
