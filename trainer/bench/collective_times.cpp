#include "trainer/bench/collective_times.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include <fmt/format.h>

#include "config/hardware_io.h"
#include "config/yaml.h"
#include "core/error.h"
#include "trainer/bench/profile_text.h"

namespace gdn::trainer::bench {

namespace {

constexpr Bytes kSmallest = Bytes{64} << 10, kLargest = Bytes{256} << 20;

} // namespace

std::vector<CollectiveTime> time_collectives(World& world, Device& device, int repeats) {
  std::vector<int> everybody(static_cast<size_t>(world.size()));
  std::iota(everybody.begin(), everybody.end(), 0);
  const std::unique_ptr<Communicator> group = world.group(everybody);
  const std::int64_t ranks = group->size();
  const DeviceMemory from_memory(device, kLargest, "what is sent"), to_memory(device, kLargest, "what is received");
  std::byte *const from = from_memory.data(), *const to = to_memory.data();
  device.fill(from, kLargest, 0);
  const double others = static_cast<double>(ranks - 1) / static_cast<double>(ranks);

  struct Kind {
    const char* name;
    double wire; // of a byte
    std::function<void(Bytes)> run;
  };
  auto parts = [&](std::byte* data, Bytes bytes) {
    std::vector<Part> out;
    for (std::int64_t r = 0; r < ranks; ++r) out.push_back({data + r * (bytes / ranks), bytes / ranks});
    return out;
  };
  const Kind kinds[] = {
      {"all_reduce", 2 * others, [&](Bytes n) { group->all_reduce(from, n / 2, DType::BF16); }},
      {"all_gather", others, [&](Bytes n) { group->all_gather(from, to, n / ranks); }},
      {"reduce_scatter", others, [&](Bytes n) { group->reduce_scatter(from, to, n / 2 / ranks, DType::BF16); }},
      {"all_to_all", others, [&](Bytes n) { group->all_to_all(parts(from, n), parts(to, n)); }},
      {"p2p", 1,
       [&](Bytes n) {
         if (group->rank() == 0) group->send(1, 0, from, n);
         if (group->rank() == 1) group->receive(0, 0, to, n);
       }},
  };
  std::vector<CollectiveTime> out;
  for (const Kind& kind : kinds)
    for (Bytes bytes = kSmallest; bytes <= kLargest; bytes *= 8) {
      std::vector<double> seconds;
      for (int i = 0; i < repeats + 2; ++i) {
        device.synchronise();
        group->barrier();
        for (int cover = 0; cover < 10; ++cover) device.fill(to, kLargest, 0); // half a millisecond, in which all is launched
        world.time_exchanges();
        kind.run(bytes);
        std::vector<double> of(static_cast<size_t>(ranks));
        for (const TimedExchange& x : world.timed_exchanges()) of[static_cast<size_t>(group->rank())] += x.seconds;
        group->sum_on_host(of); // of every rank; of messages the sender's
        of.erase(std::remove(of.begin(), of.end(), 0.0), of.end());
        if (i >= 2) seconds.push_back(*std::min_element(of.begin(), of.end()));
      }
      std::nth_element(seconds.begin(), seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2), seconds.end());
      out.push_back({kind.name, bytes, static_cast<double>(bytes) * kind.wire, seconds[seconds.size() / 2]});
    }
  return out;
}

std::vector<config::CollectiveRow> fit_collectives(const std::vector<CollectiveTime>& times, const config::Hardware& hardware, const std::string& provider,
                                                   const std::string& source, const std::string& link) {
  const BytesPerSecond rate = link == "network" ? hardware.network : hardware.scale_up;
  if (rate <= 0) throw Error(ErrorCode::Usage, fmt::format("profile '{}' has no {}: the rate that shares are of", hardware.name, link));
  std::vector<config::CollectiveRow> rows;
  for (size_t first = 0; first < times.size();) {
    std::vector<CollectiveSample> samples;
    size_t end = first;
    for (; end < times.size() && times[end].kind == times[first].kind; ++end) samples.push_back({times[end].wire, times[end].seconds});
    rows.push_back(fit_collective(times[first].kind, samples, rate, source));
    rows.back().provider = provider;
    rows.back().link = link;
    first = end;
  }
  return rows;
}

void replace_collectives(config::Hardware& hardware, const std::vector<config::CollectiveRow>& rows) {
  std::erase_if(hardware.collectives, [&](const config::CollectiveRow& old) {
    return std::any_of(rows.begin(), rows.end(), [&](const config::CollectiveRow& r) { return r.provider == old.provider && r.kind == old.kind && r.link == old.link; });
  });
  hardware.collectives.insert(hardware.collectives.begin(), rows.begin(), rows.end());
}

std::string with_collectives(const std::string& text, const std::string& file, const std::vector<config::CollectiveRow>& rows) {
  config::Hardware wanted = config::read_hardware(config::parse_yaml(text, file));
  replace_collectives(wanted, rows);
  std::vector<std::string> lines;
  auto key_of = [](const config::CollectiveRow& r) { return fmt::format("- {{provider: {}, kind: {}, link: {},", r.provider, r.kind, r.link); };
  for (const config::CollectiveRow& r : rows) lines.push_back(fmt::format("  {} share: {}, latency: {} s, source: \"{}\"}}\n", key_of(r), r.share, r.latency, r.source));
  return text_of(with_rows(text, "collectives", lines, [&](const std::string& line) {
    return std::any_of(rows.begin(), rows.end(), [&](const config::CollectiveRow& r) { return line.find(key_of(r)) != std::string::npos; });
  }), wanted, file);
}

} // namespace gdn::trainer::bench
