#include "trainer/checkpoint/parameter_state.h"

#include <algorithm>
#include <set>

namespace gdn::trainer::checkpoint {

std::vector<Item> items_of(const Parameters& parameters, const Ranks& ranks) {
  const Place& place = ranks.place();
  std::vector<Item> items;
  std::set<std::string_view> seen; // a stage may hold the word embedding twice
  for (const ParameterSlot& s : parameters.slots()) {
    if (!seen.insert(s.name()).second) continue;
    const model::Parameter& p = *s.parameter;
    const bool expert = p.group == model::ParameterGroup::RoutedExpert;
    const bool first = expert ? place.edp == 0 : place.dp == 0 && place.cp == 0 && (place.tp == 0 || p.rule() != model::ShardRule::Replicated);
    for (const char* state : kStates)
      items.push_back({state, &p, shard_of(p, ranks.topology().parallel(), {.tp = place.tp, .etp = place.etp, .ep = place.ep}), first && !s.copy});
  }
  return items;
}

std::vector<float> get(Parameters& parameters, const Item& item) {
  return item.state == "weight" ? parameters.weights(item.parameter->name) : parameters.moment(item.parameter->name, item.state == "v");
}

void set(Parameters& parameters, const Item& item, std::span<const float> values) {
  if (item.state == "weight") parameters.set_weights(item.parameter->name, values);
  else parameters.set_moment(item.parameter->name, item.state == "v", values);
}

std::vector<std::string> gather_texts(Communicator& host, const std::string& mine) {
  const auto size = static_cast<size_t>(host.size());
  std::vector<double> sizes(size, 0);
  sizes[static_cast<size_t>(host.rank())] = static_cast<double>(mine.size());
  host.sum_on_host(sizes);
  const auto most = static_cast<size_t>(*std::max_element(sizes.begin(), sizes.end()));
  std::string padded = mine, all(size * most, '\0');
  padded.resize(most);
  host.all_gather(reinterpret_cast<const std::byte*>(padded.data()), reinterpret_cast<std::byte*>(all.data()), static_cast<Bytes>(most));
  std::vector<std::string> texts;
  for (size_t r = 0; r < size; ++r) texts.push_back(all.substr(r * most, static_cast<size_t>(sizes[r])));
  return texts;
}

} // namespace gdn::trainer::checkpoint
