#include "trainer/ledger.h"

#include <algorithm>

#include <fmt/core.h>

#include "core/error.h"

namespace gdn::trainer {

Ledger::Ticket Ledger::acquire(std::string owner, Category category, Bytes bytes) {
  live_[category] += bytes;
  if (Bytes total = live_.total(); total > peak_.bytes) peak_ = {total, live_, event_ ? *event_ : ""};
  rows_.emplace(next_, Row{std::move(owner), category, bytes});
  return next_++;
}

void Ledger::release(Ticket ticket) {
  auto row = rows_.find(ticket);
  if (row == rows_.end())
    throw Error(ErrorCode::Internal, fmt::format("ledger: ticket {} is released but not live", ticket));
  live_[row->second.category] -= row->second.bytes;
  rows_.erase(row);
}

void Ledger::reset_peak() { peak_ = {live_.total(), live_, ""}; }

std::vector<Ledger::Row> Ledger::largest(size_t count) const {
  std::vector<Row> rows;
  for (const auto& [ticket, row] : rows_) rows.push_back(row);
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) {
    return a.bytes != b.bytes ? a.bytes > b.bytes : a.owner < b.owner;
  });
  if (rows.size() > count) rows.resize(count);
  return rows;
}

} // namespace gdn::trainer
