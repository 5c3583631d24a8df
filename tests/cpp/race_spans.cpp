#include <algorithm>

#include "check.h"
#include "common/spans.h"
#include "common/worker_group.h"

namespace {

using dcpx::run_workers;
using dcpx::Span;
using dcpx::SpanKind;
using dcpx::SpanLog;
using dcpx::SpanSum;
using dcpx::StopFlag;
using dcpx::Stopwatch;

constexpr std::uint64_t kLong = SpanLog::kListedNs;

// Of several at once, one of which is asked meanwhile: the sums are those of all spans, the list is
// no longer than it may be.
TEST(workers_add_spans_at_once_and_the_list_is_bounded) {
  constexpr unsigned kWorkers = 4;
  constexpr std::uint64_t kEach = 1000;
  SpanLog log;
  run_workers(kWorkers,
              [&](unsigned number, StopFlag&) {
                for (std::uint64_t i = 0; i < kEach; ++i) {
                  log.add(SpanKind::kRead, i, i + kLong, number);
                  log.add(SpanKind::kCopy, i, i + 1, 1);
                }
                CHECK(log.spans().size() <= SpanLog::kMaxSpans);
                CHECK(log.total_ns(SpanKind::kCopy) >= kEach);
              },
              {});
  const std::vector<Span> spans = log.spans();
  CHECK(spans.size() == SpanLog::kMaxSpans - SpanLog::kLateSpans);
  for (const Span& span : spans) CHECK(span.kind == SpanKind::kRead && span.worker == span.nbytes);
  CHECK(log.total_ns(SpanKind::kRead) == kWorkers * kEach * kLong);
  CHECK(log.total_ns(SpanKind::kCopy) == kWorkers * kEach);
  const std::vector<SpanSum> sums = log.sums();
  CHECK(sums.size() == std::size_t{2} * kWorkers);
  for (const SpanSum& sum : sums) {
    CHECK(sum.count == kEach && sum.worker < kWorkers);
    CHECK(sum.nbytes == (sum.kind == SpanKind::kRead ? kEach * sum.worker : kEach));
  }
}

TEST(a_list_that_is_full_takes_the_spans_that_end_a_job) {
  SpanLog log;
  for (std::size_t i = 0; i < 2 * SpanLog::kMaxSpans; ++i) log.add(SpanKind::kWrite, 0, kLong, 1);
  for (const SpanKind kind : {SpanKind::kSync, SpanKind::kEngine}) {
    log.add(kind, 0, kLong, 0);
    CHECK(log.spans().back().kind == kind);
  }
  for (std::size_t i = 0; i < SpanLog::kMaxSpans; ++i) log.add(SpanKind::kSync, 0, kLong, 0);
  CHECK(log.spans().size() == SpanLog::kMaxSpans);
}

TEST(more_workers_than_sums_share_them_and_keep_their_numbers) {
  constexpr unsigned kWorkers = SpanLog::kWorkers + 3;
  SpanLog log;
  run_workers(kWorkers, [&](unsigned, StopFlag&) { log.add(SpanKind::kSync, 0, kLong, 1); }, {});
  CHECK(log.total_ns(SpanKind::kSync) == kWorkers * kLong);
  const std::vector<Span> spans = log.spans();
  CHECK(std::any_of(spans.begin(), spans.end(),
                    [](const Span& span) { return span.worker == kWorkers - 1; }));
}

}  // namespace
