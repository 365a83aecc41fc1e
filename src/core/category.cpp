#include "core/category.h"

namespace gdn {

std::string_view name_of(Category category) {
  constexpr std::array<std::string_view, kCategoryCount> kNames{
      "parameters", "gradients", "optimizer",     "activations", "transient",
      "logits",     "workspace", "communication", "context",     "allocator"};
  return kNames[static_cast<size_t>(category)];
}

} // namespace gdn
