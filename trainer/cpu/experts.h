#pragma once
#include <vector>

#include "trainer/cpu/collectives.h"

// Rows of a mixture of experts on their way between the ranks that hold tokens and those that hold experts.
namespace gdn::trainer::cpu {

// Who sends how many rows to whom. At home, rows lie by expert; at the experts, by local expert, then by the
// rank they came from. With expert-tensor ranks every one of them gets the rows of all, and their results,
// parts of sums, go back to where each row came from.
class ExpertRoutes {
public:
  // `sent`: first row of every expert at home, and the end. Asks the other ranks for their counts. Together.
  ExpertRoutes(const OpCall& call, std::vector<std::int64_t> sent);
  // The same from counts asked for before.
  ExpertRoutes(const OpCall& call, std::vector<std::int64_t> sent, std::vector<std::int64_t> counts);

  // First row of every local expert at the experts, and the end.
  const std::vector<std::int64_t>& groups() const { return groups_; }
  // Rows of (expert-tensor rank, expert rank, local expert).
  const std::vector<std::int64_t>& counts() const { return counts_; }

  // Throws Error{DoesNotFit} when more rows arrive than `bound`.
  void require(std::int64_t bound) const;
  // Scratch of either way for a matrix of `cols` columns; `sent` rows at home, at most `bound` at the experts.
  static Bytes scratch_bytes(const model::Op& op, std::int64_t sent, std::int64_t bound, std::int64_t cols, DType dtype);
  // home -> experts; rows past the last group become zeros. Together.
  void out(const View& home, const GradView& experts, std::span<std::byte> scratch) const;
  // experts -> home, summed over expert-tensor ranks; rows at home that were not sent become zeros. Together.
  void back(const View& experts, const GradView& home, std::span<std::byte> scratch) const;

private:
  void lay_out();
  std::int64_t count(std::int64_t etp, std::int64_t ep, std::int64_t expert) const {
    return counts_[static_cast<size_t>((etp * ep_ + ep) * local_ + expert)];
  }
  std::int64_t rows_from(std::int64_t etp) const; // that arrive by way of an expert-tensor rank
  // Calls f(row at the experts, row among those of all expert-tensor ranks one after the other, count).
  template <class F> void for_stretches(F&& f) const;

  const OpCall& call_;
  Communicator *ep_group_, *etp_group_;
  std::int64_t ep_, etp_, local_;
  std::vector<std::int64_t> sent_, counts_, groups_;
};

} // namespace gdn::trainer::cpu
