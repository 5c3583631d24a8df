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

TEST(a_short_span_is_only_summed) {
  SpanLog log;
  log.add(SpanKind::kWrite, 100, 100 + kLong - 1, 7);
  log.add(SpanKind::kWrite, 200, 200 + kLong, 9);
  const std::vector<Span> spans = log.spans();
  CHECK(spans.size() == 1);
  CHECK(spans[0].begin_ns == 200 && spans[0].end_ns == 200 + kLong && spans[0].nbytes == 9);
  CHECK(spans[0].kind == SpanKind::kWrite && spans[0].worker == 0);
  const std::vector<SpanSum> sums = log.sums();
  CHECK(sums.size() == 1);
  CHECK(sums[0].count == 2 && sums[0].busy_ns == 2 * kLong - 1 && sums[0].nbytes == 16);
  CHECK(log.total_ns(SpanKind::kWrite) == 2 * kLong - 1);
  CHECK(log.total_ns(SpanKind::kCopy) == 0);
}

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

TEST(a_stopwatch_adds_its_scope) {
  SpanLog log;
  {
    const Stopwatch watch(log, SpanKind::kVerify, 5);
  }
  CHECK(log.sums().size() == 1);
  CHECK(log.sums()[0].count == 1 && log.sums()[0].nbytes == 5);
  CHECK(log.sums()[0].busy_ns == log.total_ns(SpanKind::kVerify));
}

}  // namespace
