#pragma once
#include <string>
#include <unordered_map>
#include <vector>

#include "core/category.h"

namespace gdn::trainer {

// Every byte the trainer holds, by category: what is live, and where it was highest. Fed by real
// acquire and release; it knows nothing of any plan.
class Ledger {
public:
  using Ticket = int;

  // `owner` names the buffer: "layers.3.qkv#mb2.g1".
  Ticket acquire(std::string owner, Category category, Bytes bytes);
  // Throws Error{Internal} for a ticket that is not live.
  void release(Ticket ticket);

  const CategoryBytes& live() const { return live_; }
  Bytes total() const { return live_.total(); }

  // The highest total since the last reset, and what it was made of.
  struct Peak {
    Bytes bytes = 0;
    CategoryBytes by = {};
    std::string event; // set by `mark`
  };
  // Names the event that is about to run; a new peak carries it.
  void mark(const std::string* event) { event_ = event; }
  const Peak& peak() const { return peak_; }
  void reset_peak();

  struct Row {
    std::string owner;
    Category category;
    Bytes bytes;
  };
  std::vector<Row> largest(size_t count) const; // live rows, largest first

private:
  std::unordered_map<Ticket, Row> rows_;
  Ticket next_ = 0;
  CategoryBytes live_;
  Peak peak_;
  const std::string* event_ = nullptr;
};

} // namespace gdn::trainer
