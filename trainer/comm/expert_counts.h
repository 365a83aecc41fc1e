#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace gdn::trainer {

class Communicator;

// Who sends how many rows of a mixture of experts to whom. At home, rows lie by expert; at the experts, by local expert,
// then by the rank they came from. With expert-tensor ranks every one of them gets the rows of all.
class ExpertCounts {
public:
  // `sent`: first row of every expert at home, and the end. `local`: experts of a rank. Asks the other ranks. Together.
  ExpertCounts(Communicator& ep, Communicator& etp, std::int64_t local, std::vector<std::int64_t> sent);
  // The same from counts asked for before.
  ExpertCounts(Communicator& ep, Communicator& etp, std::int64_t local, std::vector<std::int64_t> sent, std::vector<std::int64_t> counts);

  const std::vector<std::int64_t>& sent() const { return sent_; }
  // Rows of (expert-tensor rank, expert rank, local expert).
  const std::vector<std::int64_t>& counts() const { return counts_; }
  // First row of every local expert at the experts, and the end.
  const std::vector<std::int64_t>& groups() const { return groups_; }

  std::int64_t first_sent(std::int64_t ep) const { return sent_[static_cast<std::size_t>(ep * local_)]; }
  std::int64_t sent_to(std::int64_t ep) const { return first_sent(ep + 1) - first_sent(ep); }
  std::int64_t rows_from(std::int64_t etp) const; // that arrive by way of an expert-tensor rank
  std::int64_t arriving(std::int64_t ep) const;   // from an expert rank by way of this expert-tensor rank
  // Calls f(row at the experts, row among those of all expert-tensor ranks one after the other, count).
  template <class F> void for_stretches(F&& f) const {
    std::vector<std::int64_t> next = groups_; // by local expert
    std::int64_t row = 0;
    for (std::size_t i = 0; i < counts_.size(); ++i) {
      std::int64_t& at = next[i % static_cast<std::size_t>(local_)];
      f(at, row, counts_[i]);
      at += counts_[i];
      row += counts_[i];
    }
  }

  // Throws Error{DoesNotFit} when more rows arrive than `bound`; `rank` is for the message.
  void require(std::int64_t bound, std::int64_t rank) const;

protected:
  Communicator &ep_group_, &etp_group_;
  std::int64_t ep_, etp_;

private:
  void lay_out();

  std::int64_t local_;
  std::vector<std::int64_t> sent_, counts_, groups_;
};

} // namespace gdn::trainer
