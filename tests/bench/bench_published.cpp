#include <cmath>
#include <cstdio>

#include "core/error.h"
#include "tests/plan/published.h"

// Published steps of which only the time is known, beside the prediction. There is no limit: the runs overlap
// communication, use other dispatchers, or do not say what they used.
int main() {
  double sum = 0, absolute = 0;
  int count = 0;
  try {
    for (const char* file : {"throughput-qwen3-235b", "throughput-qwen3-8b", "throughput-qwen3-8b-h200"})
      for (const gdn::test::PublishedRow& row : gdn::test::published_rows(file)) {
        const gdn::plan::Estimate e = row.predicted();
        const double published = row.value("time.step_seconds"), error = e.step_seconds / published - 1;
        std::printf("%-4s %-16s %-40s published %7.2f s, predicted %7.2f s (%.2f to %.2f), %+6.1f %%%s\n", row.id.c_str(), row.profile.model.name.c_str(),
                    e.setting.text().c_str(), published, e.step_seconds, e.step_low, e.step_high, 100 * error, e.fits ? "" : ", would not fit");
        sum += error;
        absolute += std::fabs(error);
        ++count;
      }
  } catch (const gdn::Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
  std::printf("%d rows: mean error %.1f %%, bias %+.1f %%\n", count, 100 * absolute / count, 100 * sum / count);
}
