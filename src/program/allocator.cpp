#include "program/allocator.h"

#include <algorithm>

#include <fmt/core.h>

#include "core/error.h"

namespace gdn::program {

namespace {

constexpr Bytes kMiB = 1 << 20;
constexpr Bytes kMinBlock = 512;
constexpr Bytes kSmallSize = kMiB;        // largest allocation of the small pool
constexpr Bytes kSmallSegment = 2 * kMiB;
constexpr Bytes kLargeSegment = 20 * kMiB;
constexpr Bytes kMinLargeAllocation = 10 * kMiB; // from here a segment of its own size
constexpr Bytes kRoundLarge = 2 * kMiB;

Bytes rounded(Bytes size) { return std::max(kMinBlock, round_up(size, kMinBlock)); }

Bytes segment_size(Bytes size) {
  if (size <= kSmallSize) return kSmallSegment;
  return size < kMinLargeAllocation ? kLargeSegment : round_up(size, kRoundLarge);
}

constexpr size_t kPage = 32; // entries; a page of more is halved

constexpr Bytes kAddresses = Bytes{1} << 43;

// 30 bits of size (512 GiB, kLargestDevice) and 34 of address (8 TiB, kAddresses).
std::uint64_t key_of(Bytes size, Bytes address) {
  return static_cast<std::uint64_t>(size / kMinBlock) << 34 | static_cast<std::uint64_t>(address / kMinBlock);
}

constexpr auto kBelow = [](const auto& entry, std::uint64_t key) { return entry.key < key; };

} // namespace

std::vector<FreeBlocks::Page>::iterator FreeBlocks::page_with(std::uint64_t key) {
  return std::lower_bound(pages_.begin(), pages_.end(), key, [](const Page& p, std::uint64_t k) { return p.back().key < k; });
}

void FreeBlocks::insert(Bytes size, Bytes address, int block) {
  const std::uint64_t key = key_of(size, address);
  auto page = page_with(key);
  if (page == pages_.end()) {
    if (pages_.empty()) pages_.emplace_back().reserve(kPage + 1);
    page = pages_.end() - 1;
  }
  page->insert(std::lower_bound(page->begin(), page->end(), key, kBelow), {key, block});
  if (page->size() <= kPage) return;
  Page upper;
  upper.reserve(kPage + 1);
  upper.assign(page->begin() + kPage / 2, page->end());
  page->resize(kPage / 2);
  pages_.insert(page + 1, std::move(upper));
}

void FreeBlocks::erase(Bytes size, Bytes address) {
  const std::uint64_t key = key_of(size, address);
  auto page = page_with(key);
  page->erase(std::lower_bound(page->begin(), page->end(), key, kBelow));
  if (page->empty()) pages_.erase(page);
}

int FreeBlocks::take(Bytes size) {
  const std::uint64_t least = key_of(size, 0);
  auto page = page_with(least);
  if (page == pages_.end()) return -1;
  auto found = std::lower_bound(page->begin(), page->end(), least, kBelow);
  const int block = found->block;
  page->erase(found);
  if (page->empty()) pages_.erase(page);
  return block;
}

std::vector<int> FreeBlocks::all() const {
  std::vector<int> out;
  for (const Page& page : pages_)
    for (const Entry& e : page) out.push_back(e.block);
  return out;
}

int CachingAllocator::new_block(Block block) {
  if (!unused_.empty()) {
    const int id = unused_.back();
    unused_.pop_back();
    blocks_[static_cast<size_t>(id)] = block;
    return id;
  }
  blocks_.push_back(block);
  return static_cast<int>(blocks_.size()) - 1;
}

void CachingAllocator::insert(Pool& pool, int block) {
  const Block& b = blocks_[static_cast<size_t>(block)];
  pool.free.insert(b.size, b.address, block);
}

void CachingAllocator::remove(Pool& pool, int block) {
  const Block& b = blocks_[static_cast<size_t>(block)];
  pool.free.erase(b.size, b.address);
}

int CachingAllocator::grow(Pool& pool, Bytes size) {
  if (options_.expandable_segments) return map(pool, size);
  const Bytes bytes = segment_size(size);
  if (!room(bytes) || next_address_ + bytes > kAddresses) return -1;
  segments_small_.push_back(pool.small);
  reserved_ += bytes;
  const Bytes address = next_address_;
  next_address_ += bytes + kRoundLarge; // segments never touch
  return new_block({.address = address, .size = bytes, .segment = static_cast<int>(segments_small_.size()) - 1});
}

// The free block at the end of the range and as many steps more as `size` needs.
int CachingAllocator::map(Pool& pool, Bytes size) {
  const Bytes step = pool.small ? kSmallSegment : kLargeSegment;
  int last = pool.expandable;
  while (last >= 0 && blocks_[static_cast<size_t>(last)].after >= 0) last = blocks_[static_cast<size_t>(last)].after;
  const bool extends = last >= 0 && !blocks_[static_cast<size_t>(last)].used;
  const Bytes there = extends ? blocks_[static_cast<size_t>(last)].size : 0;
  const Bytes bytes = round_up(size - there, step);
  if (!room(bytes)) return -1;
  reserved_ += bytes;
  if (extends) {
    remove(pool, last);
    blocks_[static_cast<size_t>(last)].size += bytes;
    return last;
  }
  if (last < 0) {
    segments_small_.push_back(pool.small);
    // The only range of its pool, so that addresses may start anywhere.
    return pool.expandable = new_block({.address = 0, .size = bytes, .segment = static_cast<int>(segments_small_.size()) - 1});
  }
  const Block& end = blocks_[static_cast<size_t>(last)];
  const int block = new_block({.address = end.address + end.size, .size = bytes, .segment = end.segment, .before = last});
  blocks_[static_cast<size_t>(last)].after = block;
  return block;
}

CachingAllocator::Handle CachingAllocator::allocate(Bytes asked) {
  const Bytes size = rounded(asked);
  Pool& pool = size <= kSmallSize ? small_ : large_;
  int block = size <= kLargestDevice ? pool.free.take(size) : -1;
  if (block < 0) block = grow(pool, size);
  if (block < 0) {
    ++retries_;
    empty_cache();
    block = grow(pool, size);
  }
  if (block < 0)
    throw Error(ErrorCode::DoesNotFit, fmt::format("out of memory: {} asked, {} of {} reserved, {} allocated", format_bytes(asked),
                                                   format_bytes(reserved_), format_bytes(options_.capacity), format_bytes(allocated_)));
  const Bytes rest = blocks_[static_cast<size_t>(block)].size - size;
  if (pool.small || options_.expandable_segments ? rest >= kMinBlock : rest > kSmallSize) {
    const Block whole = blocks_[static_cast<size_t>(block)];
    const int remainder = new_block({.address = whole.address + size, .size = rest, .segment = whole.segment, .before = block, .after = whole.after});
    if (whole.after >= 0) blocks_[static_cast<size_t>(whole.after)].before = remainder;
    blocks_[static_cast<size_t>(block)].size = size;
    blocks_[static_cast<size_t>(block)].after = remainder;
    insert(pool, remainder);
  }
  Block& b = blocks_[static_cast<size_t>(block)];
  b.used = true;
  allocated_ += b.size;
  peak_allocated_ = std::max(peak_allocated_, allocated_);
  peak_reserved_ = std::max(peak_reserved_, reserved_);
  return block;
}

int CachingAllocator::merge(Pool& pool, int block) {
  for (const bool forwards : {false, true}) {
    Block& b = blocks_[static_cast<size_t>(block)];
    const int other = forwards ? b.after : b.before;
    if (other < 0 || blocks_[static_cast<size_t>(other)].used) continue;
    remove(pool, other);
    const int first = forwards ? block : other, second = forwards ? other : block;
    Block& left = blocks_[static_cast<size_t>(first)];
    const Block right = blocks_[static_cast<size_t>(second)];
    left.size += right.size;
    left.after = right.after;
    if (right.after >= 0) blocks_[static_cast<size_t>(right.after)].before = first;
    unused_.push_back(second);
    block = first;
  }
  return block;
}

void CachingAllocator::free(Handle block) {
  Block& b = blocks_[static_cast<size_t>(block)];
  b.used = false;
  allocated_ -= b.size;
  Pool& pool = pool_of(block);
  insert(pool, merge(pool, block));
}

void CachingAllocator::empty_cache() {
  for (Pool* pool : {&small_, &large_}) {
    for (const int id : pool->free.all()) {
      Block& b = blocks_[static_cast<size_t>(id)];
      const Bytes step = pool->small ? kSmallSegment : kLargeSegment;
      if (options_.expandable_segments ? b.after >= 0 || b.size < step : b.before >= 0 || b.after >= 0) continue;
      remove(*pool, id);
      if (options_.expandable_segments) { // whole steps at the end of the range go
        const Bytes bytes = b.size / step * step;
        reserved_ -= bytes;
        b.size -= bytes;
        if (b.size > 0) insert(*pool, id);
        else {
          if (b.before >= 0) blocks_[static_cast<size_t>(b.before)].after = -1;
          else pool->expandable = -1;
          unused_.push_back(id);
        }
        break; // the range has one end
      }
      reserved_ -= b.size;
      unused_.push_back(id);
    }
  }
}

} // namespace gdn::program
