#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "model/op.h"
#include "model/provider.h"
#include "model/span.h"
#include "program/trace.h"

// Random small op lists under random spans: the inputs of the engine's property tests.
namespace gdn::toy {

// SplitMix64: the same sequence on every machine.
class Random {
public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next();
  int below(int n) { return n <= 0 ? 0 : static_cast<int>(next() % static_cast<std::uint64_t>(n)); }
  int between(int first, int last) { return first + below(last - first + 1); }
  bool chance(double p) { return static_cast<double>(next() >> 11) * 0x1p-53 < p; }

private:
  std::uint64_t state_;
};

// Scratch, by op name and step, as a hash: any number of bytes, often none.
class HashedScratch : public model::Provider {
public:
  std::string_view name() const override { return "toy"; }
  model::Work work(const model::OpList& list, const model::Op& op, int step) const override;
};
const model::Provider& hashed_scratch();

struct Case {
  std::uint64_t seed = 0;
  model::OpList list;
  std::vector<model::Span> spans;
  program::TraceOptions options;
};

// What a random list may hold.
struct Flavour {
  bool chain = false;      // a unit of a chunk: one stream width, no external input, no caller's output
  bool legal = true;       // false: spans and aliases may break the rules
  bool next_forward = true;
  bool source = false, sink = false; // chain: starts from data; ends in the loss
};

Case random_case(std::uint64_t seed, const Flavour& flavour = {});

// List, spans and options, one line an op: what a failing test prints.
std::string dump(const Case& c);

} // namespace gdn::toy
