#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace gdn::plan {

// Every way to lay a model out on a number of GPUs, and every recompute setting of each.
struct SearchOptions {
  std::optional<Bytes> budget = {};
  bool optimizer_options = false; // also bf16 gradients and the precision-aware optimizer's dtypes
  std::optional<std::int64_t> micro_batch = {}; // only layouts with this one
  // Called with the share done, 0 to 1, and what is going on; from several threads, one at a time.
  std::function<void(double, const char*)> progress = {};
};

struct SearchPoint {
  config::Run run;      // parallelism, micro-batch, optimizer; its own recompute settings are replaced
  Estimate estimate;    // with its setting
};

// What became of the candidates. Each is counted once, by the first bound that settled it.
struct SearchCounts {
  std::int64_t parallel_points = 0; // legal ones: TP x PP x VPP x CP x EP x ETP x micro-batch (x optimizer)
  std::int64_t settings = 0;        // recompute settings of the point with most
  std::int64_t candidates = 0;
  std::int64_t static_state = 0;    // parameters, gradients and optimizer alone exceed the budget
  std::int64_t memory_bound = 0;    // so does the lower bound of the peak
  std::int64_t dominated = 0;       // an evaluated candidate is no slower and needs no more than its bounds
  std::int64_t illegal = 0;         // pricing met an error that no rule foresees
  std::int64_t evaluated = 0;       // priced exactly
};

struct Search {
  SearchCounts counts;
  std::vector<SearchPoint> front; // of those that fit: fastest first, each needs less than all before it
  std::int64_t fitting = 0;       // of the exactly priced ones
  std::optional<Overrun> overrun; // when nothing fits: of the candidate with the lowest bound
  std::vector<cost::Assumption> assumptions;
};

// All legal layouts of `run.parallel.gpus` GPUs and `run.global_batch` sequences; `run` gives everything
// else. Pipelines are split evenly; where the layers do not divide, the stages in the middle get one more (1, 2,
// 4, ... virtual stages a rank); the run's own layout replaces that where its sizes come up. Sequence parallelism
// exactly where TP > 1. The result does not depend on the number of threads.
Search search(const config::Model& model, const config::Run& run, const config::Hardware& hardware,
              const SearchOptions& options = {});

// The legal points of a search, in order. `run` with each point's sizes; what `search` walks.
std::vector<config::Run> parallel_points(const config::Model& model, const config::Run& run, const SearchOptions& options = {});

// A run's sizes as Megatron-LM arguments: "--tensor-model-parallel-size", "2", ...
std::vector<std::string> megatron_parallel_flags(const config::Model& model, const config::Run& run);

} // namespace gdn::plan
