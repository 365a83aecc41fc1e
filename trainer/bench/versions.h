#pragma once
#include <string>

namespace gdn::trainer::bench {

// What a figure was measured with: the commit of this build, and of the CUDA side (where there is one) driver and
// library versions: "gdntrain 0.1.0 (2dc8d88), CUDA 13.0, driver 580.159.04, cuBLASLt 13.1.0".
std::string versions(bool cuda);

} // namespace gdn::trainer::bench
