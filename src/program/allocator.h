#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/units.h"

// PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp, as of 2.10), one stream: what a sequence
// of allocations and frees makes it reserve.
namespace gdn::program {

constexpr Bytes kLargestDevice = (Bytes{1} << 39) - 1; // 512 GiB: what an allocator can keep apart

struct AllocatorOptions {
  bool expandable_segments = false; // PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
  Bytes capacity = kLargestDevice;  // bytes that the device can give
};

// The free blocks of a pool by size, then address. Sorted pages: a rank of a large model has thousands of
// equal free blocks (what its parameters were built in) beside the few that a step moves.
class FreeBlocks {
public:
  void insert(Bytes size, Bytes address, int block);
  void erase(Bytes size, Bytes address); // which must be there
  int take(Bytes size);                  // the smallest of at least `size` (lowest address among equals), or -1
  std::vector<int> all() const;

private:
  struct Entry {
    std::uint64_t key = 0; // size, then address, both in units of 512 bytes
    int block = -1;
  };
  using Page = std::vector<Entry>; // never empty
  std::vector<Page>::iterator page_with(std::uint64_t key); // the first whose last entry is not below

  std::vector<Page> pages_;
};

// Sizes are rounded to 512 bytes. Up to 1 MiB they come from the small pool, whose segments have 2 MiB;
// above from the large one, in segments of 20 MiB below 10 MiB and of the size rounded to 2 MiB from
// there. The smallest free block that is large enough is taken (lowest address among equals), and split
// where at least 512 bytes (small pool) or more than 1 MiB (large pool) would remain. Freed blocks merge
// with free neighbours of their segment. With expandable segments each pool is one address range, mapped
// in steps of 2 or 20 MiB, whose last free block grows, and every remainder of 512 bytes is split off.
class CachingAllocator {
public:
  using Handle = int;
  explicit CachingAllocator(AllocatorOptions options = {}) : options_(options) {}

  // Throws Error{DoesNotFit} when the device is full even after cached segments have been given back.
  Handle allocate(Bytes size);
  void free(Handle handle);
  // Gives segments (or mapped steps) without a used block back.
  void empty_cache();

  Bytes allocated() const { return allocated_; } // used blocks, as rounded to 512 bytes
  Bytes reserved() const { return reserved_; }   // segments
  Bytes peak_allocated() const { return peak_allocated_; }
  Bytes peak_reserved() const { return peak_reserved_; }
  std::int64_t retries() const { return retries_; } // times that cached segments had to be given back

private:
  struct Block {
    Bytes address = 0, size = 0;
    int segment = 0, before = -1, after = -1; // neighbours in the segment
    bool used = false, mapped = true;
  };
  struct Pool {
    bool small = false;
    FreeBlocks free = {};
    int expandable = -1; // first block of its address range
  };

  int new_block(Block block);
  void insert(Pool& pool, int block);
  void remove(Pool& pool, int block);
  int grow(Pool& pool, Bytes size);          // from the device, or -1 when it is full
  int map(Pool& pool, Bytes size);           // expandable: the end of the range grows
  int merge(Pool& pool, int block);          // with free neighbours
  bool room(Bytes bytes) const { return reserved_ + bytes <= std::min(options_.capacity, kLargestDevice); }
  Pool& pool_of(int block) { return segments_small_[static_cast<size_t>(blocks_[static_cast<size_t>(block)].segment)] ? small_ : large_; }

  AllocatorOptions options_;
  Pool small_{true}, large_{false};
  std::vector<Block> blocks_;
  std::vector<int> unused_;
  std::vector<char> segments_small_; // per segment
  Bytes next_address_ = 0;
  Bytes allocated_ = 0, reserved_ = 0, peak_allocated_ = 0, peak_reserved_ = 0;
  std::int64_t retries_ = 0;
};

} // namespace gdn::program
