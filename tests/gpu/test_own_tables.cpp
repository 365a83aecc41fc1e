#include <doctest/doctest.h>

#include "kernels/describe/own.h"
#include "tests/trainer/engine/fixture.h"
#ifdef GDN_CUDA_DEVICE
#include "trainer/cuda/ops.h"
#endif

using namespace gdn;
using namespace gdn::trainer;
using config::LayerKind;
using config::MlpKind;

TEST_CASE("every op kind has a row of its own, and says why where it has no kernel") {
  for (int k = 0; k <= static_cast<int>(model::OpKind::Toy); ++k) {
    const auto kind = static_cast<model::OpKind>(k);
    CAPTURE(std::string(model::name_of(kind)));
    const kernels::OwnEntry& entry = kernels::own_entry(kind);
    CHECK(entry.kind == kind);
    CHECK((entry.work != nullptr) == entry.reason.empty());
#ifdef GDN_CUDA_DEVICE
    CHECK((cuda::functions_of(kind).forward != nullptr) == (entry.work != nullptr));
#endif
  }
}

TEST_CASE("what our kernels need is described for every op and step of both stacks") {
  size_t seen = 0;
  for (const char* stack : {"native", "megatron"}) {
    config::Model m = fixture::model({LayerKind::Gdn, LayerKind::Attention, LayerKind::Gdn2}, {MlpKind::Moe, MlpKind::Dense, MlpKind::Moe});
    config::Run r = fixture::run();
    r.stack = stack;
    plan::Workload workload(m, r, kernels::own_provider());
    for (const model::Chunk& chunk : model::chunks_of_rank(m.layers(), r.parallel, 0))
      for (const plan::PlacedUnit& u : workload.units(chunk, {}))
        for (const model::Op& op : u.unit->list->ops)
          for (int step = -1; step < static_cast<int>(op.steps.size()); ++step) {
            const model::Work w = kernels::own_provider().work(*u.unit->list, op, step);
            CHECK(w.scratch >= 0);
            CHECK(w.scratch % 4 == 0);
            CHECK((w.kernels == 0 || w.traffic > 0 || w.flops > 0));
            // A product moves at least its operands once and executes at least what the formula counts.
            if (op.kind == model::OpKind::Linear || op.kind == model::OpKind::GroupedLinear) CHECK(w.flops >= op.model_flops);
            ++seen;
          }
  }
  CHECK(seen > 200);
}
