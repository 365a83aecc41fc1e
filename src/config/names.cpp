#include "config/model.h"
#include "config/run.h"

// Names of the enumerations, as written in files and in every output.
namespace gdn::config {

std::string_view name_of(LayerKind kind) {
  switch (kind) {
  case LayerKind::Gdn: return "gdn";
  case LayerKind::Gdn2: return "gdn2";
  case LayerKind::Attention: return "attention";
  case LayerKind::Unmodelled: return "unmodelled";
  }
  return "?";
}

std::string_view name_of(MlpKind kind) { return kind == MlpKind::Moe ? "moe" : "mlp"; }

std::string_view name_of(Build build) { return build == Build::Te ? "te" : "local"; }

std::string_view name_of(L2Norm l2norm) {
  switch (l2norm) {
  case L2Norm::Caller: return "caller";
  case L2Norm::Kernel: return "kernel";
  case L2Norm::Off: return "off";
  }
  return "?";
}

std::string_view name_of(Granularity granularity) {
  switch (granularity) {
  case Granularity::None: return "none";
  case Granularity::Selective: return "selective";
  case Granularity::Full: return "full";
  }
  return "?";
}

std::string_view name_of(VisionMode mode) {
  switch (mode) {
  case VisionMode::Trained: return "trained";
  case VisionMode::Frozen: return "frozen";
  case VisionMode::Absent: return "absent";
  }
  return "?";
}

std::string_view name_of(CrossEntropy loss) {
  switch (loss) {
  case CrossEntropy::Unfused: return "unfused";
  case CrossEntropy::FusedNative: return "native";
  case CrossEntropy::FusedTe: return "te";
  case CrossEntropy::ChunkedLinear: return "chunked";
  }
  return "?";
}

} // namespace gdn::config
