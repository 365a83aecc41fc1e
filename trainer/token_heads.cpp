#include "trainer/token_heads.h"

#include "model/kinds/gdn.h"
#include "trainer/comm/communicator.h"

namespace gdn::trainer {

TokenHeads::TokenHeads(const OpCall& c, std::int64_t columns)
    : group(c.group(model::Group::Cp)), shards(*c.batch().shards), sections{columns}, ranks(group.size()), width(columns / ranks) {
  if (const auto* a = std::get_if<model::GdnAttr>(&c.op().attr)) sections = model::head_sections(*a, columns, ranks);
}

View as_tokens(const OpCall& c, const View& v, bool token_side) {
  return with_rows(c, v, token_side ? static_cast<std::int64_t>(c.local_positions().size()) : c.batch().sequences.back());
}

bool to_heads(const OpCall& c) { return c.list().tensor(c.op().inputs[0]).rows() < c.list().tensor(c.op().outputs[0]).rows(); }

} // namespace gdn::trainer
