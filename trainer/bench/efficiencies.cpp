#include "trainer/bench/efficiencies.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include <fmt/format.h>

#include "config/hardware_io.h"
#include "config/yaml.h"
#include "core/error.h"
#include "trainer/bench/profile_text.h"

namespace gdn::trainer::bench {

namespace {

using model::Family;

// As src/cost: matrix work is a share of the peak, the rest of the nominal bandwidth.
bool matrix_work(Family f) { return f == Family::Gemm || f == Family::GroupedGemm || f == Family::Attention || f == Family::Rule; }

struct Point {
  double size = 0;
  double ideal = 0, taken = 0; // seconds at share 1; seconds without launches
  bool hidden = false;         // the bytes explain the time
  double share() const { return std::min(1.0, ideal / taken); }
  void add(const Point& p) {
    size = (size * taken + p.size * p.taken) / (taken + p.taken);
    ideal += p.ideal;
    taken += p.taken;
  }
};

Point point_of(const Sample& s, const config::Hardware& h, double peak) {
  // A run cannot be all launches: an op of a few microseconds keeps a tenth of its time.
  const double taken = std::max(s.seconds - s.work.kernels * h.launch_latency, 0.1 * s.seconds);
  const double bandwidth = h.achieved_bandwidth > 0 ? h.achieved_bandwidth : h.bandwidth, traffic = static_cast<double>(s.work.traffic);
  const bool matrix = matrix_work(s.work.family);
  const double ideal = matrix ? s.work.flops / peak : traffic / h.bandwidth;
  return {std::max(s.work.size, 1.0), ideal * s.runs, taken * s.runs, matrix && traffic / bandwidth > 0.98 * taken};
}

// Neighbours in size become one, until none are within `factor` and there are at most `most`.
void merge(std::vector<Point>& points, size_t most) {
  std::sort(points.begin(), points.end(), [](const Point& a, const Point& b) { return a.size < b.size; });
  for (;;) {
    size_t closest = 0;
    double distance = HUGE_VAL;
    for (size_t i = 0; i + 1 < points.size(); ++i)
      if (const double d = std::log(points[i + 1].size / points[i].size); d < distance) {
        distance = d;
        closest = i;
      }
    if (points.size() < 2 || (distance > std::log(1.1) && points.size() <= most)) return;
    points[closest].add(points[closest + 1]);
    points.erase(points.begin() + static_cast<std::ptrdiff_t>(closest) + 1);
  }
}

bool same_kind(const config::EfficiencyRow& a, const config::EfficiencyRow& b) {
  return a.provider == b.provider && a.family == b.family && a.op == b.op && a.pass == b.pass;
}

bool replaced(const config::EfficiencyRow& row, const std::vector<config::EfficiencyRow>& rows) {
  return std::any_of(rows.begin(), rows.end(), [&](const config::EfficiencyRow& r) { return same_kind(r, row); });
}

double rounded(double value, int digits) { return std::stod(fmt::format("{:.{}g}", value, digits)); }

// How the line of a row begins.
std::string key_of(const config::EfficiencyRow& r) {
  return fmt::format("- {{provider: {}, family: {},{} pass: {},", r.provider, r.family, r.op.empty() ? "" : fmt::format(" op: {},", r.op), r.pass);
}

std::string line_of(const config::EfficiencyRow& r) {
  std::string source = r.source;
  std::replace(source.begin(), source.end(), '"', '\'');
  return fmt::format("  {}{} value: {}, source: \"{}\"}}\n", key_of(r), r.size ? fmt::format(" size: {},", *r.size) : "", r.value, source);
}

} // namespace

std::vector<config::EfficiencyRow> fit_efficiencies(const std::vector<Sample>& samples, const config::Hardware& hardware,
                                                    const std::string& provider, DType dtype, const std::string& source, int most) {
  const double peak = dtype == DType::FP32 ? hardware.bf16 / 2 : hardware.bf16; // tf32 units, as in src/cost
  std::map<std::tuple<Family, std::string, std::string_view>, std::vector<Point>> points; // by family, pass, op; "": all of the family
  for (const Sample& s : samples) {
    if (s.work.family == Family::None || s.seconds <= 0) continue;
    const Point p = point_of(s, hardware, peak);
    if (p.ideal <= 0) continue;
    points[{s.work.family, s.pass, ""}].push_back(p);
    if (!s.work.op.empty()) points[{s.work.family, s.pass, s.work.op}].push_back(p);
  }
  std::vector<config::EfficiencyRow> rows;
  for (auto& [key, of] : points) {
    const auto& [family, pass, op] = key;
    if (std::any_of(of.begin(), of.end(), [](const Point& p) { return !p.hidden; })) std::erase_if(of, [](const Point& p) { return p.hidden; });
    merge(of, static_cast<size_t>(most));
    for (const Point& p : of)
      rows.push_back({provider, std::string(model::name_of(family)), pass, rounded(p.size, 6), rounded(p.share(), 6), source, std::string(op)});
  }
  return rows;
}

void replace_efficiencies(config::Hardware& hardware, const std::vector<config::EfficiencyRow>& rows) {
  std::erase_if(hardware.efficiencies, [&](const config::EfficiencyRow& r) { return replaced(r, rows); });
  hardware.efficiencies.insert(hardware.efficiencies.end(), rows.begin(), rows.end());
}

std::string with_efficiencies(const std::string& text, const std::string& file, const std::vector<config::EfficiencyRow>& rows) {
  config::Hardware wanted = config::read_hardware(config::parse_yaml(text, file));
  replace_efficiencies(wanted, rows);
  std::vector<std::string> lines;
  for (const config::EfficiencyRow& r : rows) lines.push_back(line_of(r));
  return text_of(with_rows(text, "efficiencies", lines, [&](const std::string& line) {
    return std::any_of(rows.begin(), rows.end(), [&](const config::EfficiencyRow& r) { return line.find(key_of(r)) != std::string::npos; });
  }), wanted, file);
}

config::CollectiveRow fit_collective(const std::string& kind, const std::vector<CollectiveSample>& samples, BytesPerSecond rate,
                                     const std::string& source) {
  if (samples.size() < 2) throw Error(ErrorCode::Usage, fmt::format("{}: two sizes at least are needed", kind));
  auto by_size = [](const CollectiveSample& a, const CollectiveSample& b) { return a.wire < b.wire; };
  const CollectiveSample small = *std::min_element(samples.begin(), samples.end(), by_size), large = *std::max_element(samples.begin(), samples.end(), by_size);
  const double per_byte = (large.seconds - small.seconds) / (large.wire - small.wire);
  if (!(per_byte > 0)) throw Error(ErrorCode::Numeric, fmt::format("{}: {} bytes take no longer than {}", kind, large.wire, small.wire));
  config::CollectiveRow row;
  row.kind = kind;
  row.share = rounded(std::min(1.0, 1 / (per_byte * rate)), 4);
  row.latency = rounded(std::max(0.0, small.seconds - per_byte * small.wire), 3);
  row.source = source;
  return row;
}

} // namespace gdn::trainer::bench
