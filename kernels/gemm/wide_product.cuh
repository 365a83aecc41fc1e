// Warpgroup products of 64 rows by 32 to 256 columns, both operands in shared memory: as product() of wgmma_sm90.cuh, for
// right operands of any height.
#pragma once
#include "kernels/common/wgmma_sm90.cuh"

namespace gdn::kernels {

// Sixteen operands of the instruction, and the accumulators they are.
#define GDN_R0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define GDN_R1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define GDN_R2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define GDN_R3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define GDN_R4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define GDN_R5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define GDN_R6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define GDN_R7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define GDN_D(b)                                                                                                          \
  "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3]), "+f"(d[b + 4]), "+f"(d[b + 5]), "+f"(d[b + 6]),            \
      "+f"(d[b + 7]), "+f"(d[b + 8]), "+f"(d[b + 9]), "+f"(d[b + 10]), "+f"(d[b + 11]), "+f"(d[b + 12]),                  \
      "+f"(d[b + 13]), "+f"(d[b + 14]), "+f"(d[b + 15])
// columns; numbers of the operands behind the accumulators; the accumulators' names, and themselves.
#define GDN_PRODUCT(columns, a_, b_, accumulate_, ta, tb, high, names, ...)                                               \
  asm volatile("{\n.reg .pred p;\n.reg .b64 left, right;\nsetp.ne.b32 p, %" #accumulate_ ", 0;\n"                        \
               "mov.b64 left, {%" #a_ ", %" #high "};\nmov.b64 right, {%" #b_ ", %" #high "};\n"                          \
               "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" names "}, left, right, p, 1, 1, %" #ta    \
               ", %" #tb ";\n}\n"                                                                                         \
               : __VA_ARGS__                                                                                              \
               : "r"(a), "r"(b), "r"(accumulate), "n"(static_cast<int>(kA)), "n"(static_cast<int>(kB)), "n"(kDescriptorHigh))

// d[64 x kColumns], the first kColumns / 2 of `d`, (+)= a b.
template <int kColumns, Contract kA, Contract kB>
__device__ __forceinline__ void wide_product(float* d, std::uint32_t a, std::uint32_t b, int accumulate) {
  if constexpr (kColumns == 32)
    GDN_PRODUCT(32, 16, 17, 18, 19, 20, 21, GDN_R0, GDN_D(0));
  if constexpr (kColumns == 64)
    GDN_PRODUCT(64, 32, 33, 34, 35, 36, 37, GDN_R0 ", " GDN_R1, GDN_D(0), GDN_D(16));
  if constexpr (kColumns == 96)
    GDN_PRODUCT(96, 48, 49, 50, 51, 52, 53, GDN_R0 ", " GDN_R1 ", " GDN_R2, GDN_D(0), GDN_D(16), GDN_D(32));
  if constexpr (kColumns == 128)
    GDN_PRODUCT(128, 64, 65, 66, 67, 68, 69, GDN_R0 ", " GDN_R1 ", " GDN_R2 ", " GDN_R3, GDN_D(0), GDN_D(16), GDN_D(32), GDN_D(48));
  if constexpr (kColumns == 160)
    GDN_PRODUCT(160, 80, 81, 82, 83, 84, 85, GDN_R0 ", " GDN_R1 ", " GDN_R2 ", " GDN_R3 ", " GDN_R4, GDN_D(0), GDN_D(16), GDN_D(32), GDN_D(48), GDN_D(64));
  if constexpr (kColumns == 192)
    GDN_PRODUCT(192, 96, 97, 98, 99, 100, 101, GDN_R0 ", " GDN_R1 ", " GDN_R2 ", " GDN_R3 ", " GDN_R4 ", " GDN_R5, GDN_D(0), GDN_D(16), GDN_D(32), GDN_D(48), GDN_D(64), GDN_D(80));
  if constexpr (kColumns == 224)
    GDN_PRODUCT(224, 112, 113, 114, 115, 116, 117, GDN_R0 ", " GDN_R1 ", " GDN_R2 ", " GDN_R3 ", " GDN_R4 ", " GDN_R5 ", " GDN_R6, GDN_D(0), GDN_D(16), GDN_D(32), GDN_D(48), GDN_D(64), GDN_D(80), GDN_D(96));
  if constexpr (kColumns == 256)
    GDN_PRODUCT(256, 128, 129, 130, 131, 132, 133, GDN_R0 ", " GDN_R1 ", " GDN_R2 ", " GDN_R3 ", " GDN_R4 ", " GDN_R5 ", " GDN_R6 ", " GDN_R7, GDN_D(0), GDN_D(16), GDN_D(32), GDN_D(48), GDN_D(64), GDN_D(80), GDN_D(96), GDN_D(112));
  static_assert(kColumns % 32 == 0 && kColumns <= 256);
}
#undef GDN_PRODUCT
#undef GDN_D
#undef GDN_R0
#undef GDN_R1
#undef GDN_R2
#undef GDN_R3
#undef GDN_R4
#undef GDN_R5
#undef GDN_R6
#undef GDN_R7

} // namespace gdn::kernels
