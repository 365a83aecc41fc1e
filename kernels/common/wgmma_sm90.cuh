// Warpgroup matrix products: 64 rows, bf16 operands, fp32 accumulators.
//
// `a`, `b` below are descriptors of operand tiles (or four registers for a).
//
// Accumulator layout of warp w (0..3 in its group), lane 4g + t: row 16w + g holds columns 8n + 2t
// and 8n + 2t + 1 in d[4n], d[4n+1]; row 16w + g + 8 the same columns in d[4n+2], d[4n+3]. The A
// operand in registers has that very layout, so a rounded accumulator is the next product's A
// operand.
#pragma once
#include <cstdint>

#include "kernels/common/ptx_sm90.cuh"

namespace gdn::kernels {

// Operand tiles in shared memory are 64 rows of 64 bf16 (128 bytes), 128-byte swizzled, 1024-byte
// aligned: 8 KiB. kAlongRow: the contraction runs along a row (k contiguous); kAcrossRows: it runs
// over the rows (the other dimension is contiguous).
enum class Contract { kAlongRow = 0, kAcrossRows = 1 };

inline constexpr int kTileBytes = 8192;

// Operand descriptors. Their upper word is the same for all tiles: 1024 bytes between groups of
// eight rows, 128-byte swizzle. The lower word holds the address and, for kAcrossRows with 128
// columns, the distance to the tile with columns 64..127, which is the next one unless told. Adding
// bytes >> 4 moves it.
inline constexpr std::uint32_t kDescriptorHigh = 1024u >> 4 | 1u << 30;

// In a cluster an address has the CTA's rank in its highest byte, which is no part of a descriptor.
__device__ __forceinline__ std::uint32_t descriptor(std::uint32_t address, int next_tile = kTileBytes) {
  return (address & 0x3ffff) >> 4 | (next_tile >> 4) << 16;
}
// Distance from the descriptor of a tile to its 16-deep step `step`.
template <Contract kContract>
__device__ constexpr std::uint32_t step_offset(int step) {
  return step * (kContract == Contract::kAlongRow ? 32 : 2048) >> 4;
}
inline constexpr std::uint32_t kNextTile = kTileBytes >> 4;

// Before the first product after registers or shared memory were written.
__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Ties registers to this point of the program: neither reads nor writes of them move across it.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(std::uint32_t (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// Waits until at most `kPending` committed groups are unfinished; `d...` are the accumulators the
// caller reads next.
template <int kPending, class... Accumulators>
__device__ __forceinline__ void products_wait(Accumulators&... d) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  (pin(d), ...);
}

// d[64 x 64] (+)= a b with a in registers. d is overwritten when `accumulate` is 0.
template <Contract kB>
__device__ __forceinline__ void product(float (&d)[32], const std::uint32_t* a, std::uint32_t b,
                                        int accumulate = 1) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               ".reg .b64 right;\n"
               "setp.ne.b32 p, %37, 0;\n"
               "mov.b64 right, {%36, %39};\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
               "{%32, %33, %34, %35}, right, p, 1, 1, %38;\n"
               "}\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                 "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),
                 "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),
                 "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
                 "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),
                 "+f"(d[31])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate),
                 "n"(static_cast<int>(kB)), "n"(kDescriptorHigh));
}

// d[64 x 128] (+)= a b with a in registers. d is overwritten when `accumulate` is 0.
template <Contract kB>
__device__ __forceinline__ void product(float (&d)[64], const std::uint32_t* a, std::uint32_t b,
                                        int accumulate = 1) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               ".reg .b64 right;\n"
               "setp.ne.b32 p, %69, 0;\n"
               "mov.b64 right, {%68, %71};\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
               "{%64, %65, %66, %67}, right, p, 1, 1, %70;\n"
               "}\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                 "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),
                 "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),
                 "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
                 "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),
                 "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),
                 "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
                 "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
                 "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]),
                 "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]),
                 "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate),
                 "n"(static_cast<int>(kB)), "n"(kDescriptorHigh));
}

// d[64 x 64] (+)= a b with both operands in shared memory.
template <Contract kA, Contract kB>
__device__ __forceinline__ void product(float (&d)[32], std::uint32_t a, std::uint32_t b,
                                        int accumulate = 1) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               ".reg .b64 left, right;\n"
               "setp.ne.b32 p, %34, 0;\n"
               "mov.b64 left, {%32, %37};\n"
               "mov.b64 right, {%33, %37};\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
               "left, right, p, 1, 1, %35, %36;\n"
               "}\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                 "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),
                 "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),
                 "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
                 "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),
                 "+f"(d[31])
               : "r"(a), "r"(b), "r"(accumulate), "n"(static_cast<int>(kA)),
                 "n"(static_cast<int>(kB)), "n"(kDescriptorHigh));
}

// d[64 x 96] (+)= a b with both operands in shared memory.
template <Contract kA, Contract kB>
__device__ __forceinline__ void product(float (&d)[48], std::uint32_t a, std::uint32_t b, int accumulate = 1) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               ".reg .b64 left, right;\n"
               "setp.ne.b32 p, %50, 0;\n"
               "mov.b64 left, {%48, %53};\n"
               "mov.b64 right, {%49, %53};\n"
               "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
               "left, right, p, 1, 1, %51, %52;\n"
               "}\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                 "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
                 "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
                 "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
                 "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
                 "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
                 "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
               : "r"(a), "r"(b), "r"(accumulate), "n"(static_cast<int>(kA)),
                 "n"(static_cast<int>(kB)), "n"(kDescriptorHigh));
}

// d[64 x 128] (+)= a b with both operands in shared memory.
template <Contract kA, Contract kB>
__device__ __forceinline__ void product(float (&d)[64], std::uint32_t a, std::uint32_t b,
                                        int accumulate = 1) {
  asm volatile("{\n"
               ".reg .pred p;\n"
               ".reg .b64 left, right;\n"
               "setp.ne.b32 p, %66, 0;\n"
               "mov.b64 left, {%64, %69};\n"
               "mov.b64 right, {%65, %69};\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
               "left, right, p, 1, 1, %67, %68;\n"
               "}\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                 "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                 "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                 "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                 "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
                 "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
                 "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                 "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
                 "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
                 "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
               : "r"(a), "r"(b), "r"(accumulate), "n"(static_cast<int>(kA)),
                 "n"(static_cast<int>(kB)), "n"(kDescriptorHigh));
}

} // namespace gdn::kernels
