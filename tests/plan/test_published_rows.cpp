#include <doctest/doctest.h>

#include <cmath>
#include <set>

#include "tests/plan/published.h"

using namespace gdn;

// Steps that others measured and published (profiles/measured): peak allocated memory on every row, step
// time on every row that has one. No byte is fitted. The times rest on efficiencies fitted to Llama3-70B;
// Llama3-405B took no part in the fit.
namespace {

struct Errors {
  double sum = 0, absolute = 0, worst = 0;
  int count = 0;
  void add(double error) {
    sum += error;
    absolute += std::fabs(error);
    worst = std::max(worst, std::fabs(error));
    ++count;
  }
  double bias() const { return sum / count; }
  double mean() const { return absolute / count; }
};

// Rows of one configuration differ in micro-batches only: "S1-4", "S1-8", ...
std::string configuration(const std::string& id) { return id.substr(0, id.find('-')); }

double relative(double predicted, double measured) { return predicted / measured - 1; }

// Allocated peaks, each configuration once.
Errors memory_errors(const std::string& file, double each) {
  Errors errors;
  std::set<std::string> seen;
  for (const test::PublishedRow& row : test::published_rows(file)) {
    if (!seen.insert(configuration(row.id)).second) continue;
    CAPTURE(row.id);
    const double error = relative(static_cast<double>(row.predicted().peak_bytes), row.value("memory.allocated_bytes"));
    CHECK(std::fabs(error) < each);
    errors.add(error);
  }
  return errors;
}

Errors time_errors(const std::string& file) {
  Errors errors;
  for (const test::PublishedRow& row : test::published_rows(file)) {
    CAPTURE(row.id);
    const double error = relative(row.predicted().step_seconds, row.value("time.step_seconds"));
    CHECK(std::fabs(error) < 0.10);
    errors.add(error);
  }
  return errors;
}

} // namespace

TEST_CASE("Llama3 on 8 B200: allocated peak of 15 configurations, TP 1 to 8, PP 2, CP 4 and 8, 4K to 128K") {
  const Errors small = memory_errors("simumax-llama3-70b-b200", 0.005);
  const Errors large = memory_errors("simumax-llama3-405b-b200", 0.005);
  CHECK(small.count == 8);
  CHECK(large.count == 7);
  CHECK(small.mean() < 0.001);
  CHECK(large.mean() < 0.001);
}

TEST_CASE("Llama3 on 8 B200: both pipeline stages, not only the worst") {
  for (const char* file : {"simumax-llama3-70b-b200", "simumax-llama3-405b-b200"})
    for (const test::PublishedRow& row : test::published_rows(file)) {
      if (row.value("ranks.0.allocated_bytes") == 0) continue;
      CAPTURE(row.id);
      const plan::Estimate e = row.predicted();
      for (int r = 0; r < 2; ++r) {
        CAPTURE(r);
        const double measured = row.value(r == 0 ? "ranks.0.allocated_bytes" : "ranks.1.allocated_bytes");
        CHECK(std::fabs(relative(static_cast<double>(e.ranks[static_cast<size_t>(r)].peak.bytes), measured)) < 0.005);
      }
      CHECK(e.worst == (row.value("ranks.0.allocated_bytes") > row.value("ranks.1.allocated_bytes") ? 0 : 1));
    }
}

TEST_CASE("Mixtral cut to 4 layers: allocated peak at TP 1 and 2, micro-batch 1 and 2") {
  CHECK(memory_errors("mbridge-mixtral", 0.014).mean() < 0.008); // one decimal of a GiB is published: 0.6 % at 8
}

TEST_CASE("Llama3 on 8 B200: step times, those fitted to, and a model size that was not") {
  const Errors fitted = time_errors("simumax-llama3-70b-b200"), checked = time_errors("simumax-llama3-405b-b200");
  CHECK(fitted.count == 16);
  CHECK(checked.count == 15);
  CHECK(std::fabs(fitted.bias()) < 0.02);
  CHECK(std::fabs(checked.bias()) < 0.02);
  CHECK(checked.mean() < 0.04);
}

TEST_CASE("Llama3 on 8 B200: the simulated reserve contains what PyTorch reserved, and is at most 8 % wide") {
  int rows = 0;
  for (const char* file : {"simumax-llama3-70b-b200", "simumax-llama3-405b-b200"}) {
    std::set<std::string> seen;
    for (const test::PublishedRow& row : test::published_rows(file)) {
      if (!seen.insert(configuration(row.id)).second) continue;
      CAPTURE(row.id);
      plan::Estimator estimator(row.profile.model, row.profile.run, row.hardware);
      const plan::Estimate e = estimator.evaluate({});
      const plan::ReservedBand band = estimator.reserved(e).value();
      const double reserved = row.value("memory.reserved_bytes");
      CHECK(static_cast<double>(band.low) <= reserved);
      CHECK(static_cast<double>(band.high) >= reserved);
      CHECK(static_cast<double>(band.high) <= 1.08 * static_cast<double>(band.low));
      CHECK(band.low > e.peak_bytes);
      ++rows;
    }
  }
  CHECK(rows == 15);
}
