// Thin names for the Hopper instructions the kernels use: barriers in shared memory, the bulk copy
// engine, matrix loads and stores. One function, one thing: mostly one instruction, or one wait loop.
#pragma once
#include <cstdint>

#include <cuda.h>
#include <cuda_bf16.h>

namespace gdn::kernels {

__device__ __forceinline__ std::uint32_t smem_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// 2^x, flushing to 0 for very negative x (also for -inf).
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats rounded to bf16; `low` lands in the low half, that is at the lower address.
__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float bf16_low(std::uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float bf16_high(std::uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// Keeps an address in its register: left to itself the compiler derives it anew for every use.
__device__ __forceinline__ std::uint32_t kept(std::uint32_t address) {
  asm volatile("" : "+r"(address));
  return address;
}

__device__ __forceinline__ float2 load_shared_pair(std::uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
  return x;
}
__device__ __forceinline__ float load_shared(std::uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
  return x;
}

__device__ __forceinline__ void store_shared(std::uint32_t address, float4 x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
// What CTA `rank` of the cluster has at this address of its own shared memory.
__device__ __forceinline__ float4 load_shared_of(int rank, std::uint32_t address) {
  float4 x;
  asm volatile("{\n"
               ".reg .b32 there;\n"
               "mapa.shared::cluster.u32 there, %4, %5;\n"
               "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n"
               "}\n"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address), "r"(rank)
               : "memory");
  return x;
}

// --- barriers -------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(std::uint64_t* bar, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(bar)), "r"(arrivals)
               : "memory");
}
// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(std::uint64_t* bar, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(bar)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(std::uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_arrive(std::uint64_t* bar) {
  barrier_arrive(smem_address(bar));
}
// A warp's arrival for all its lanes: __syncwarp orders their accesses before lane 0's arrival.
// compute-sanitizer's race checker follows each thread's own arrivals only and would report hazards
// that are none; for it, build with GDN_RACECHECK defined.
#ifdef GDN_RACECHECK
inline constexpr int kWarpArrivals = 32;
#else
inline constexpr int kWarpArrivals = 1;
#endif
__device__ __forceinline__ void warp_arrive(std::uint32_t bar) {
  __syncwarp();
  if (kWarpArrivals == 32 || threadIdx.x % 32 == 0) barrier_arrive(bar);
}
__device__ __forceinline__ void warp_arrive(std::uint64_t* bar) { warp_arrive(smem_address(bar)); }
// Waits until the phase of parity `parity` has completed.
__device__ __forceinline__ void barrier_wait(std::uint32_t bar, std::uint32_t parity) {
  asm volatile("{\n"
               ".reg .pred done;\n"
               "again:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@done bra finished;\n"
               "bra again;\n"
               "finished:\n"
               "}\n" ::"r"(bar),
               "r"(parity)
               : "memory");
}
__device__ __forceinline__ void barrier_wait(std::uint64_t* bar, std::uint32_t parity) {
  barrier_wait(smem_address(bar), parity);
}
// Barrier `id` (1..15) among `threads` threads of the CTA.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Of all threads of the cluster that have not ended; what they wrote to shared memory is seen by all.
__device__ __forceinline__ void cluster_barrier() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\n"
               "barrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// Moves registers between the warpgroups of a CTA: producers give, math groups take.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- ordering -------------------------------------------------------------------------------

// Ordinary shared-memory writes before it become visible to the copy engine and to wgmma.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- copy engine ----------------------------------------------------------------------------

// One box of a 3-D tensor map (column, head, token) into shared memory.
__device__ __forceinline__ void load_box(void* dst, const CUtensorMap* map, std::uint64_t* bar,
                                         int column, int head, int token) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem_address(dst)),
               "l"(map), "r"(smem_address(bar)), "r"(column), "r"(head), "r"(token)
               : "memory");
}
// `bytes` (multiple of 16) contiguous bytes into shared memory.
__device__ __forceinline__ void load_bulk(void* dst, const void* src, std::uint32_t bytes,
                                          std::uint64_t* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];" ::"r"(smem_address(dst)),
               "l"(src), "r"(bytes), "r"(smem_address(bar))
               : "memory");
}
// One box of shared memory to memory; what lies outside the tensor is left out.
__device__ __forceinline__ void store_box(const CUtensorMap* map, const void* src, int column, int head,
                                          int token) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(smem_address(src)), "r"(column), "r"(head), "r"(token)
               : "memory");
}
__device__ __forceinline__ void store_bulk(void* dst, const void* src, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst),
               "r"(smem_address(src)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until at most `kPending` of this thread's store groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until at most `kPending` of this thread's store groups are not yet written to memory.
template <int kPending>
__device__ __forceinline__ void store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- matrix fragments -----------------------------------------------------------------------

// Four 8x8 bf16 matrices; lanes 8i..8i+7 give the row addresses of matrix i, which is register i.
__device__ __forceinline__ void load_matrix_transposed(std::uint32_t (&r)[4],
                                                       std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void store_matrix(std::uint32_t address, std::uint32_t a,
                                             std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void store_matrix_transposed(std::uint32_t address, std::uint32_t a,
                                                        std::uint32_t b, std::uint32_t c,
                                                        std::uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

// d += a b for one 16x8 tile with k = 8, tf32 operands given as fp32 bits (low 13 bits ignored).
__device__ __forceinline__ void mma_tf32(float (&d)[4], const std::uint32_t (&a)[4],
                                         const std::uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
               "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

} // namespace gdn::kernels
