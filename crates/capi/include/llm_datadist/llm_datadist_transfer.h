// The handle of an asynchronous call, an addition to the original. Include llm_datadist.h instead.
#ifndef LLM_DATADIST_LLM_DATADIST_TRANSFER_H_
#define LLM_DATADIST_LLM_DATADIST_TRANSFER_H_

#include <cstdint>

#include "llm_datadist/llm_datadist_types.h"

namespace llm_datadist {

// An addition to the original: one asynchronous call of LlmDataDist, whose methods with Async in their names start
// it. The handle owns a place in a list of the library, so it can be moved but not copied.
//
// Destroying the handle neither cancels the transfer nor waits for it, and its event is still polled. The handle
// may outlive the engine: Finalize ends the transfer, and the handle still answers. Any thread may call the methods,
// several at a time. Only one may move or destroy the handle. A handle that is empty or was moved from, and every
// handle of its parent in a forked child, is of no transfer: Done returns true, and Result LLM_FAILED.
class Transfer {
 public:
  Transfer() = default;
  Transfer(Transfer &&other) noexcept : number_(other.number_) { other.number_ = 0U; }
  Transfer &operator=(Transfer &&other) noexcept {
    if (this != &other) {
      Free();
      number_ = other.number_;
      other.number_ = 0U;
    }
    return *this;
  }
  Transfer(const Transfer &) = delete;
  Transfer &operator=(const Transfer &) = delete;
  ~Transfer() { Free(); }

  // Returns a number that no other transfer of this process has, and that Event::transfer repeats. An empty handle
  // has 0.
  uint64_t Number() const { return number_; }

  // Returns whether the transfer has ended. Then nothing of it touches memory any more. Does not take the outcome.
  bool Done() const { return llm_datadist_transfer_done(number_); }

  // Waits until the transfer has ended, at most timeout_ms milliseconds, and returns its outcome like Result. 0 does
  // not wait; values below 0 are LLM_PARAM_INVALID.
  Status Wait(int32_t timeout_ms) const { return llm_datadist_transfer_wait(number_, timeout_ms); }

  // Returns the status with which the transfer has ended, or LLM_WAIT_PROC_TIMEOUT while it runs. No transfer ends
  // with that status: one whose time limit has passed ends with LLM_TIMEOUT, and one that was cancelled or that
  // Finalize has ended with LLM_FAILED. After a failure, the rows that the transfer writes have undefined contents,
  // and LastErrorMessage returns the reason. The method takes the outcome, so that Poll does not return it any
  // more; it may be called again.
  Status Result() const { return llm_datadist_transfer_result(number_); }

  // Cancels the transfer. Never waits: if the transfer has begun, it ends a little later, and its event reports
  // this. Returns true if it will end with LLM_FAILED, and false if its outcome can no longer change.
  bool Cancel() const { return llm_datadist_transfer_cancel(number_); }

  // Returns whether Cancel has ended the transfer, or will end it.
  bool Cancelled() const { return llm_datadist_transfer_cancelled(number_); }

  // Returns how many bytes are known to be in place. Final once the transfer has ended.
  uint64_t Bytes() const { return Progress().done; }

  // Returns the nanoseconds from the start of the transfer to its end, or until now while it runs.
  uint64_t Nanos() const { return llm_datadist_transfer_nanos(number_); }

  // Returns how far the transfer is, in bytes.
  TransferProgress Progress() const {
    TransferProgress progress;
    (void)llm_datadist_transfer_progress(number_, &progress.done, &progress.total);
    return progress;
  }

 private:
  friend class LlmDataDist;

  explicit Transfer(uint64_t number) : number_(number) {}

  void Free() {
    if (number_ != 0U) {
      (void)llm_datadist_transfer_free(number_);
    }
  }

  uint64_t number_ = 0U;
};

}  // namespace llm_datadist

#endif  // LLM_DATADIST_LLM_DATADIST_TRANSFER_H_
