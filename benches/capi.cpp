// The calls of the C++ class that benches/capi.rs measures, compiled by it into a library of their own.
#include <time.h>

#include "llm_datadist/llm_datadist.h"

using namespace llm_datadist;

namespace {

LlmDataDist *engine = nullptr;
Cache cache{};

// Of this thread: what others do on a shared machine is no part of a call.
double Now() {
  timespec now{};
  (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

template <typename Call>
double Nanoseconds(uint64_t calls, Call call) {
  const double started = Now();
  bool good = true;
  for (uint64_t number = 0; number < calls; ++number) {
    good = call(static_cast<uint32_t>(number)) == LLM_SUCCESS && good;
  }
  const double took = Now() - started;
  return good ? took / static_cast<double>(calls) : -1.0;
}

}  // namespace

extern "C" bool Prepare(uint32_t tensors, int64_t rows, int64_t row_bytes) {
  engine = new LlmDataDist(1, LlmRole::kPrompt);
  CacheDesc desc{};
  desc.num_tensors = tensors;
  desc.data_type = DT_UINT8;
  desc.shape = {rows, row_bytes};
  return engine->Initialize({{OPTION_DEVICE_ID, "0"}}) == LLM_SUCCESS &&
         engine->AllocateCache(desc, cache) == LLM_SUCCESS;
}

extern "C" double Deallocate(uint64_t calls) {
  return Nanoseconds(calls, [](uint32_t) { return engine->DeallocateCache(99); });
}

extern "C" double CopyCache(uint64_t calls) {
  return Nanoseconds(calls, [](uint32_t number) { return engine->CopyKvCache(cache, cache, number % 2, 2 + number % 2); });
}

extern "C" double CopyBlocks(uint64_t calls) {
  static const std::vector<uint64_t> src{0};
  static const std::vector<std::vector<uint64_t>> dst{{3}};
  return Nanoseconds(calls, [](uint32_t) { return engine->CopyKvBlocks(cache, cache, src, dst); });
}
