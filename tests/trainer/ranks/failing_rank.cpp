#include <csignal>
#include <cstring>
#include <limits>

#include "tests/trainer/ranks/equality.h"

// "rows": more rows arrive at a rank's experts than it planned for, while the other waits for its results.
// "document": one rank alone is given an empty document.
// "die": rank 1 is killed while rank 0 waits for it.
int main(int, char** argv) {
  using namespace gdn;
  using namespace gdn::trainer;
  return run_ranks([&](World& world) {
    if (std::strcmp(argv[1], "die") == 0) {
      auto group = world.group({0, 1});
      group->barrier();
      if (world.rank() == 1) std::raise(SIGKILL);
      group->barrier();
      return 0;
    }
    const config::Model model = ranks_test::small({config::LayerKind::Gdn}, {config::MlpKind::Moe});
    config::Run run = ranks_test::run_of("native", {.ep = 2, .gpus = 2}, 2);
    const bool rows = std::strcmp(argv[1], "rows") == 0;
    run.moe_imbalance = rows ? 1 : 2; // a router is never that even
    CpuDevice device;
    const Ranks ranks(world, run.parallel);
    Session session(model, run, device, std::numeric_limits<Bytes>::max(), nullptr, &ranks);
    session.use(trainer::fixture::modules({}));
    session.parameters().initialise(7);
    std::vector<Batch> batches = trainer::fixture::batches(model, run, static_cast<std::uint64_t>(world.rank()));
    if (!rows && world.rank() == 1) batches[0].sequences = {0, 30, 30, 80};
    session.run(batches);
    return 0;
  });
}
