// The operand forms of the warpgroup product that the kernels rely on, and the fragment moves
// between registers and swizzled tiles, each against a loop on the CPU.
#include <cstdio>

#include "kernels/common/tensor_map.h"
#include "kernels/gdn/rule_tiles.cuh"
#include "tests/gpu/device.h"

using namespace gdn::kernels;
using namespace gdn::gpu_test;

namespace {

constexpr int kForms = 6;

// a, b: [64, 128] bf16 by tiles of 64 columns. out: [kForms][64][128] fp32.
__global__ void forms_kernel(const __grid_constant__ CUtensorMap a_map,
                             const __grid_constant__ CUtensorMap b_map, float* out) {
  extern __shared__ __align__(1024) char raw[];
  char *a = raw, *b = raw + 2 * kTileBytes, *c = raw + 4 * kTileBytes;
  __shared__ std::uint64_t loaded;
  if (threadIdx.x == 0) {
    barrier_init(&loaded, 1);
    barrier_init_fence();
    barrier_expect(&loaded, 4 * kTileBytes);
    for (int half = 0; half < 2; ++half) {
      load_box(a + half * kTileBytes, &a_map, &loaded, 64 * half, 0, 0);
      load_box(b + half * kTileBytes, &b_map, &loaded, 64 * half, 0, 0);
    }
  }
  __syncthreads();
  barrier_wait(&loaded, 0);
  const Lane at;
  auto write = [&](int form, const float* d, int count) {
    for (int i = 0; i < count; ++i)
      out[(form * 64 + at.row() + 8 * (i % 4 / 2)) * 128 + 8 * (i / 4) + 2 * at.t + i % 2] = d[i];
  };
  std::uint32_t at_transposed[16]; // A operand of (first tile of a)^T
  load_tile_transposed(smem_address(a), at, at_transposed);
  float d[32], wide[64];

  products_begin(); // 0: a0^T b0^T, b along rows, a from registers
  for (int k = 0; k < 4; ++k)
    product<Contract::kAlongRow>(d, &at_transposed[4 * k],
                                 descriptor(smem_address(b)) + step_offset<Contract::kAlongRow>(k),
                                 k > 0);
  products_commit();
  products_wait<0>(d);
  write(0, d, 32);
  products_begin(); // 1: a0^T b0, b across rows
  for (int k = 0; k < 4; ++k)
    product<Contract::kAcrossRows>(
        d, &at_transposed[4 * k],
        descriptor(smem_address(b)) + step_offset<Contract::kAcrossRows>(k), k > 0);
  products_commit();
  products_wait<0>(d);
  write(1, d, 32);
  products_begin(); // 2: a0^T b, 128 columns
  for (int k = 0; k < 4; ++k)
    product<Contract::kAcrossRows>(
        wide, &at_transposed[4 * k],
        descriptor(smem_address(b)) + step_offset<Contract::kAcrossRows>(k), k > 0);
  products_commit();
  products_wait<0>(wide);
  write(2, wide, 64);
  products_begin(); // 3: a b^T over 128 columns, both in shared memory
  for (int k = 0; k < 8; ++k)
    product<Contract::kAlongRow, Contract::kAlongRow>(
        d,
        descriptor(smem_address(a) + k / 4 * kTileBytes) + step_offset<Contract::kAlongRow>(k % 4),
        descriptor(smem_address(b) + k / 4 * kTileBytes) + step_offset<Contract::kAlongRow>(k % 4),
        k > 0);
  products_commit();
  products_wait<0>(d);
  write(3, d, 32);
  products_begin(); // 4: a0^T b0 with the transposed a from shared memory
  for (int k = 0; k < 4; ++k)
    product<Contract::kAcrossRows, Contract::kAcrossRows>(
        d, descriptor(smem_address(a)) + step_offset<Contract::kAcrossRows>(k),
        descriptor(smem_address(b)) + step_offset<Contract::kAcrossRows>(k), k > 0);
  products_commit();
  products_wait<0>(d);
  write(4, d, 32);

  // 5: left half, an accumulator holding 64 row + column stored straight, read back through the
  // swizzle; right half, the same stored transposed
  for (int i = 0; i < 32; ++i)
    d[i] = (at.row() + 8 * (i % 4 / 2)) + 128.0f * ((8 * (i / 4) + 2 * at.t + i % 2) % 2);
  store_tile(smem_address(c), at, d);
  std::uint32_t packed[16];
  pack_operand(d, packed);
  store_tile_transposed(smem_address(c + kTileBytes), at, packed);
  __syncthreads();
  for (int i = threadIdx.x; i < 64 * 64; i += blockDim.x) {
    const int row = i / 64, column = i % 64;
    for (int half = 0; half < 2; ++half) {
      const auto* x = reinterpret_cast<const __nv_bfloat16*>(
          c + half * kTileBytes + in_tile(row, column / 8) + column % 8 * 2);
      out[(5 * 64 + row) * 128 + 64 * half + column] = __bfloat162float(*x);
    }
  }
}

} // namespace

int main() {
  if (!have_device()) return kSkip;
  Random random{1};
  std::vector<Bf16> a(64 * 128), b(64 * 128);
  for (auto& x : a) x = to_bf16(static_cast<float>(random.normal()));
  for (auto& x : b) x = to_bf16(static_cast<float>(random.normal()));
  DeviceArray<Bf16> da(a), db(b);
  DeviceArray<float> out(kForms * 64 * 128);
  const auto a_map = make_tile_map({"a", da.get(), 64, 1, 128, 128, 128});
  const auto b_map = make_tile_map({"b", db.get(), 64, 1, 128, 128, 128});
  constexpr int kBytes = 6 * kTileBytes;
  GDN_CUDA(cudaFuncSetAttribute(forms_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  forms_kernel<<<1, 128, kBytes>>>(a_map, b_map, out.get());
  check_launch("forms_kernel");
  GDN_CUDA(cudaDeviceSynchronize());
  const auto got = out.download();

  auto at = [](const std::vector<Bf16>& x, int row, int column) {
    return value(x[row * 128 + column]);
  };
  int failures = 0;
  const char* names[kForms] = {
      "registers, along rows", "registers, across rows",  "registers, across rows, 128 wide",
      "shared, along rows",    "shared, left transposed", "stores"};
  for (int form = 0; form < kForms; ++form) {
    double worst = 0;
    const int columns = form == 2 || form == 5 ? 128 : 64;
    for (int i = 0; i < 64; ++i)
      for (int j = 0; j < columns; ++j) {
        double want = 0;
        if (form == 0)
          for (int k = 0; k < 64; ++k) want += at(a, k, i) * at(b, j, k);
        if (form == 1 || form == 2 || form == 4)
          for (int k = 0; k < 64; ++k) want += at(a, k, i) * at(b, k, j);
        if (form == 3)
          for (int k = 0; k < 128; ++k) want += at(a, i, k) * at(b, j, k);
        if (form == 5) want = j < 64 ? i + 128 * (j % 2) : (j - 64) + 128 * (i % 2);
        const double error = std::abs(got[(form * 64 + i) * 128 + j] - want);
        worst = error <= worst ? worst : error; // NaN propagates
      }
    const bool ok = worst < 1e-3;
    failures += !ok;
    std::printf("%-36s max error %.2e %s\n", names[form], worst, ok ? "ok" : "FAILED");
  }
  return failures ? 1 : 0;
}
