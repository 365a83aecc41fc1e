#pragma once
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "trainer/checkpoint/reader.h"

// Between what ranks hold in memory and the pieces of a checkpoint.
namespace gdn::trainer::checkpoint {

// One tensor of what a rank holds: which state of which parameter, and which part of it.
struct Item {
  std::string state;
  const model::Parameter* parameter = nullptr;
  Shard shard = {};
  bool write = true; // false: another rank writes the same
};
// Weight and moments of every parameter on a rank, in the table's order. `held` says which parameters
// the rank has (its pipeline stage).
std::vector<Item> items_of(const model::ParameterTable& table, const config::Parallel& parallel, const ShardRanks& ranks,
                           const std::function<bool(const model::Parameter&)>& held);
// Of a rank that holds every parameter whole.
std::vector<Item> items_of(const model::ParameterTable& table);

// Writes one rank's file into `folder`, fsynced, and returns its part of the manifest: without pieces, and
// without a file, when others write everything it holds. `get` gives the elements of an item in its
// shard's order; it is called for every item, as ranks may have to call it together, even when writing
// fails. Throws Error{Io}.
FileEntry write_file(const std::filesystem::path& folder, std::int64_t rank, const std::vector<Item>& items,
                     const std::function<std::vector<float>(const Item&)>& get);

// Error{Checkpoint} unless the checkpoint is of a model with these parameters: names, shapes, sections
// and their sizes. The vocabulary may be padded differently.
void require_same_tensors(const Reader& reader, const model::ParameterTable& table, std::int64_t vocab);

// Reads every item and hands it to `set`.
void read_items(Reader& reader, const std::vector<Item>& items, const std::function<void(const Item&, const std::vector<float>&)>& set);

} // namespace gdn::trainer::checkpoint
