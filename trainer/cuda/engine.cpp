#include "trainer/cuda/engine.h"

#include <fmt/core.h>

#include "core/error.h"
#include "kernels/describe/own.h"

namespace gdn::trainer::cuda {

kernels::LaunchContext Engine::launch(const OpCall& c) const {
  const Bytes bytes = kernels::own_work(c.list(), c.op(), c.step()).scratch;
  if (bytes == 0) return launch();
  return {stream, sm_count, c.scratch(bytes).data(), bytes};
}

std::int32_t* Engine::table(const OpCall& c, int op) {
  auto [slot, fresh] = slots_.try_emplace(&c.host_table(op), slots_given_);
  if (!fresh && slots_given_ - slot->second > kTables) { // given away: of a program that is gone, if this one is not too large
    if (op != c.op_index())
      throw Error(ErrorCode::Internal, fmt::format("{}: the rows per expert of more than {} layers and micro-batches are alive", c.name(), kTables));
    slot->second = slots_given_;
    fresh = true;
  }
  if (fresh) ++slots_given_;
  return tables + slot->second % kTables * kTableSize;
}

void* take(kernels::LaunchContext& context, Bytes bytes) {
  const Bytes rounded = round_up(bytes, 256);
  void* at = context.scratch;
  context.scratch = static_cast<char*>(context.scratch) + rounded;
  context.scratch_bytes -= rounded;
  return at;
}

} // namespace gdn::trainer::cuda
