#include <doctest/doctest.h>

#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "small_run.h"
#include "trainer/checkpoint/reader.h"

// Checkpoints of several ranks through the commands that people use: mpirun, --checkpoint, --resume.
namespace fs = std::filesystem;
using namespace gdn::test;

namespace {

const Layout kOne{};
const std::vector<std::pair<std::string, Layout>> kLayouts{
    {"TP 2", {2, {"tensor_model_parallel_size=2", "sequence_parallel=true"}}},
    {"EP 2, native", {2, {"expert_model_parallel_size=2", "moe_imbalance=2", "stack=native", "recompute_modules=[]"}}},
    {"PP 2", {2, {"pipeline_model_parallel_size=2"}}},
    {"CP 2, native", {2, {"context_parallel_size=2", "cp_comm_type=all_gather", "stack=native", "recompute_modules=[]"}}},
    {"DP 2", {2, {}}},
};

Ended checked(const Layout& layout, const fs::path& output, const Arguments& more) {
  Ended e = run(layout, output, more);
  REQUIRE_MESSAGE(e.status == 0, e.text);
  return e;
}

// Whole tensors of every state, whoever wrote which part.
std::map<std::string, std::vector<float>> tensors_of(const fs::path& path) {
  using namespace gdn::trainer::checkpoint;
  Reader reader(path);
  reader.verify();
  std::map<std::string, std::vector<float>> tensors;
  for (const TensorEntry& t : reader.manifest().tensors)
    for (const char* state : kStates) tensors[std::string(state) + "." + t.name] = reader.read(state, t.name, t.shape, whole(t.shape));
  return tensors;
}

} // namespace

TEST_CASE("reshard: one rank -> TP 2 -> EP 2 -> PP 2 -> CP 2 -> DP 2 -> TP 2 with EP 2 -> one rank, in bf16: not a bit changes") {
  const TemporaryFolder folder;
  checked(kOne, folder / "0", {"--steps", "2", "--checkpoint", folder / "0/kept"});
  const fs::path first = checkpoint_of(folder / "0/kept", 2);
  const auto original = tensors_of(first);
  CHECK(original.size() > 60);
  auto hops = kLayouts;
  hops.push_back({"TP 2 with EP 2", {4, {"tensor_model_parallel_size=2", "sequence_parallel=true", "expert_model_parallel_size=2", "moe_imbalance=2"}}});
  hops.push_back({"one rank", kOne});
  fs::path from = first;
  int hop = 0;
  for (const auto& [name, layout] : hops) {
    CAPTURE(name);
    const fs::path output = folder / std::to_string(++hop), kept = output / "kept";
    const Ended e = checked(layout, output, {"--steps", "2", "--resume", from, "--checkpoint", kept});
    from = checkpoint_of(kept, 2);
    CHECK(has(e.text, "all 2 steps were done: only written anew, " + from.string()));
    CHECK(tensors_of(from) == original);
    CHECK((weights_of(kept, 2).size() == 1) == (layout.ranks == 1 || name == "CP 2, native" || name == "DP 2"));
  }
  CHECK(weights_of(from.parent_path(), 2) == weights_of(first.parent_path(), 2)); // the files, byte by byte
}

TEST_CASE("layouts: from another layout's checkpoint on, losses are those of one rank; from its own, every bit") {
  const TemporaryFolder folder;
  auto fp32 = [](Layout l) {
    l.settings.push_back("params_dtype=fp32");
    return l;
  };
  checked(fp32(kOne), folder / "one", {"--steps", "4", "--checkpoint-every", "1"});
  const auto expected = steps_of(folder / "one");
  fs::path from = checkpoint_of(folder / "one/checkpoints", 2);
  const auto original = tensors_of(from);
  for (const auto& [name, layout] : kLayouts) {
    CAPTURE(name);
    const fs::path output = folder / name, kept = output / "checkpoints";
    checked(fp32(layout), output, {"--steps", "4", "--checkpoint-every", "1", "--resume", from});
    const auto steps = steps_of(output);
    CHECK(steps.size() == 2);
    for (int s : {3, 4}) {
      CAPTURE(s);
      CHECK(std::abs(loss_of(steps.at(s)) - loss_of(expected.at(s))) < 1e-5); // step 3: the forward of the same weights
    }
    from = checkpoint_of(kept, 2); // as this layout writes it
    CHECK(tensors_of(from) == original);
    const auto last = weights_of(kept, 4);
    fs::remove_all(checkpoint_of(kept, 4));
    const Ended again = checked(fp32(layout), output, {"--steps", "4", "--checkpoint-every", "1", "--resume"});
    CHECK(has(again.text, "resuming after step 3"));
    CHECK(!has(again.text, "changed since the checkpoint"));
    CHECK(steps_of(output) == steps);
    CHECK(weights_of(kept, 4) == last);
  }
}
