#pragma once
#include <functional>
#include <string>
#include <vector>

#include "tests/trainer/engine/fixture.h"
#include "tests/trainer/ranks/ranks.h"

// A run on several ranks against the same run on one, which every rank makes for itself.
namespace gdn::trainer::ranks_test {

struct Case {
  config::Model model;
  config::Run run;                    // with its parallel sizes; global_batch counts all data-parallel ranks
  std::vector<std::string> modules = {};
  double loss_tolerance = 1e-5, gradient_tolerance = 1e-4;
  // Changes the micro-batches of a step (those of all data-parallel ranks), whatever the layout.
  std::function<void(std::vector<Batch>&)> edit = {};
  // Changes the initial weights, whatever part of them a rank holds.
  std::function<void(Parameters&)> prepare = {};
};

// Five steps: losses of every step, all gradients of the first and the last norm by norm, auxiliary losses,
// expert loads, and the ledger's peak against the prediction.
void check_equal(const Case& c);

// fp32, sizes that divide in every way tested here.
config::Model small(std::vector<config::LayerKind> mixers, std::vector<config::MlpKind> mlps);
config::Run run_of(std::string stack, config::Parallel parallel, std::int64_t micro_batches_of_all = 4);
config::Model hybrid(); // a GDN and an attention layer, each with a mixture of experts
inline const char* const kStacks[] = {"megatron", "native"};
// Documents of 80 tokens with boundaries inside the pieces of two and of four context ranks, one of a token.
Case packed(config::Model model, config::Run run);

} // namespace gdn::trainer::ranks_test
