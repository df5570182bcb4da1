// The class hixl::Hixl: one-sided reads and writes by address, over the C interface of libllm_datadist.
//
// It needs C++14, throws no exceptions of its own, and links with -lllm_datadist alone. All rules are in the library.
#ifndef HIXL_HIXL_H_
#define HIXL_HIXL_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "hixl/hixl_types.h"
#include "llm_datadist/llm_datadist_c.h"

namespace hixl {

// Values and structures of the C interface.
namespace view {

// Whether the library knows everything that this header uses. If not, every call returns FAILED.
inline bool Understood() { return llm_datadist_abi_version() >= LLM_DATADIST_ABI_VERSION; }

inline LlmDatadistText Of(const AscendString &text) { return {text.GetString(), text.GetLength()}; }

inline AscendString Of(const LlmDatadistText &text) { return {text.bytes, text.size}; }

inline std::vector<LlmDatadistHixlOption> Of(const std::map<AscendString, AscendString> &options) {
  std::vector<LlmDatadistHixlOption> list;
  list.reserve(options.size());
  for (const auto &option : options) {
    list.push_back({Of(option.first), Of(option.second)});
  }
  return list;
}

// The two structures have the same layout, and only the library reads the operations.
static_assert(sizeof(TransferOpDesc) == sizeof(LlmDatadistHixlOp), "layout");
static_assert(offsetof(TransferOpDesc, local_addr) == offsetof(LlmDatadistHixlOp, local_addr), "layout");
static_assert(offsetof(TransferOpDesc, remote_addr) == offsetof(LlmDatadistHixlOp, remote_addr), "layout");
static_assert(offsetof(TransferOpDesc, len) == offsetof(LlmDatadistHixlOp, len), "layout");
inline const LlmDatadistHixlOp *Of(const std::vector<TransferOpDesc> &ops) {
  return reinterpret_cast<const LlmDatadistHixlOp *>(ops.data());
}

inline uint64_t Number(const void *pointer) { return reinterpret_cast<uintptr_t>(pointer); }

inline void *Pointer(uint64_t number) { return reinterpret_cast<void *>(static_cast<uintptr_t>(number)); }

}  // namespace view

// An engine: registers memory, connects to other engines, and reads and writes their memory by address. The program
// at the other end calls nothing.
//
// Any number of threads may use an object, but no call may run beside the destructor. Calls return FAILED before
// Initialize has succeeded and after Finalize. Time limits are in milliseconds and cover the whole call; a limit below
// 1 is PARAM_INVALID. A forked child cannot use the objects of its parent. It creates its own.
class Hixl {
 public:
  Hixl() : handle_(view::Understood() ? llm_datadist_hixl_new() : 0U) {}

  // Calls Finalize, unless it was called.
  ~Hixl() { (void)llm_datadist_hixl_free(handle_); }

  Hixl(const Hixl &) = delete;
  Hixl &operator=(const Hixl &) = delete;

  // Opens the engine. local_engine is its address and identity: ip:port, ip, [ip6]:port or [ip6]. With a port above
  // 0, others can connect to it. Returns PARAM_INVALID for an invalid address or option, and FAILED if the address is
  // in use or belongs to another host. If the engine is open, only checks the options.
  Status Initialize(const AscendString &local_engine, const std::map<AscendString, AscendString> &options) {
    const auto list = view::Of(options);
    return llm_datadist_hixl_initialize(handle_, view::Of(local_engine), list.data(), list.size());
  }

  // Waits for the calls that are running, at most until their limits, and closes the engine. Later calls return FAILED
  // at once. Cancels asynchronous transfers and connections. Afterwards, this process no longer reads or writes memory
  // for the engine. The object can be initialized again.
  void Finalize() { (void)llm_datadist_hixl_finalize(handle_); }

  // Registers memory, which must stay valid until DeregisterMem or Finalize. Registering the same range again gives the
  // same handle. Returns PARAM_INVALID for an empty range, and for a range that overlaps another one of its type.
  Status RegisterMem(const MemDesc &mem, MemType type, MemHandle &mem_handle) {
    uint64_t handle = 0U;
    const Status status = llm_datadist_hixl_register_mem(handle_, mem.addr, mem.len, mem.local_only,
                                                         static_cast<int32_t>(type), &handle);
    mem_handle = view::Pointer(handle);
    return status;
  }

  // Ends the registration of a range, and waits until no transfer uses it, about 10 s at most. After TIMEOUT, transfers
  // still use the memory, and the same call waits again. An unknown handle is SUCCESS; null is PARAM_INVALID.
  Status DeregisterMem(MemHandle mem_handle) {
    return llm_datadist_hixl_deregister_mem(handle_, view::Number(mem_handle));
  }

  // Connects to another engine, whose program need not call anything. Returns ALREADY_CONNECTED if the connection
  // exists, FAILED if no engine listens at the address or if it refuses, and TIMEOUT.
  Status Connect(const AscendString &remote_engine, int32_t timeout_in_millis = 1000) {
    return llm_datadist_hixl_connect(handle_, view::Of(remote_engine), timeout_in_millis);
  }

  // Ends the connection to another engine, and cancels all transfers over it. Returns NOT_CONNECTED if there is none.
  Status Disconnect(const AscendString &remote_engine, int32_t timeout_in_millis = 1000) {
    return llm_datadist_hixl_disconnect(handle_, view::Of(remote_engine), timeout_in_millis);
  }

  // Queues a connection for a thread of the engine; GetAsyncConnectStatus returns its state. Returns
  // RESOURCE_EXHAUSTED if the queue is full.
  Status ConnectAsync(const AscendString &remote_engine, int32_t timeout_in_millis = 1000) {
    return llm_datadist_hixl_connect_async(handle_, view::Of(remote_engine), timeout_in_millis);
  }

  // Queues a disconnection for a thread of the engine; GetAsyncConnectStatus returns its state. Returns
  // RESOURCE_EXHAUSTED if the queue is full.
  Status DisconnectAsync(const AscendString &remote_engine, int32_t timeout_in_millis = 1000) {
    return llm_datadist_hixl_disconnect_async(handle_, view::Of(remote_engine), timeout_in_millis);
  }

  // Sets status to the state of the latest asynchronous call for an engine.
  Status GetAsyncConnectStatus(const AscendString &remote_engine, AsyncConnectStatus &status) {
    uint32_t state = 0U;
    const Status result = llm_datadist_hixl_connect_state(handle_, view::Of(remote_engine), &state);
    status = static_cast<AsyncConnectStatus>(state);
    return result;
  }

  // Sets status to the states of all engines with asynchronous calls.
  Status GetAsyncConnectStatus(std::map<AscendString, AsyncConnectStatus> &status) {
    const LlmDatadistHixlConnection *list = nullptr;
    size_t count = 0U;
    const Status result = llm_datadist_hixl_connect_states(handle_, &list, &count);
    status.clear();
    for (size_t i = 0U; i < count; ++i) {
      status[view::Of(list[i].remote_engine)] = static_cast<AsyncConnectStatus>(list[i].state);
    }
    return result;
  }

  // Reads memory of another engine, or writes it. Each operation must lie inside one registered range at both ends
  // (PARAM_INVALID). After SUCCESS, all bytes are in place. After a failure, the contents of the destination are
  // undefined. A WRITE above 2 MiB to a process that is stopped may take 5 s longer than its limit, until no process
  // reads the memory of the caller. Also returns NOT_CONNECTED, TIMEOUT and FAILED.
  Status TransferSync(const AscendString &remote_engine, TransferOp operation,
                      const std::vector<TransferOpDesc> &op_descs, int32_t timeout_in_millis = 1000) {
    return llm_datadist_hixl_transfer_sync(handle_, view::Of(remote_engine), static_cast<int32_t>(operation),
                                           view::Of(op_descs), op_descs.size(), timeout_in_millis);
  }

  // Starts a transfer, and sets req to its request for GetTransferStatus, or to null after a failure. The call waits
  // only to connect, or to ask for a range that was not used before; after 1 s it returns TIMEOUT. Disconnect cancels
  // the request. The request fails when the other engine gives up, after 600 s.
  Status TransferAsync(const AscendString &remote_engine, TransferOp operation,
                       const std::vector<TransferOpDesc> &op_descs, const TransferArgs &optional_args,
                       TransferReq &req) {
    uint64_t number = 0U;
    const Status status = llm_datadist_hixl_transfer_async(
        handle_, view::Of(remote_engine), static_cast<int32_t>(operation), view::Of(op_descs), op_descs.size(),
        view::Number(optional_args.user_data), &number);
    req = view::Pointer(number);
    return status;
  }

  // Sets status to the state of a request. A final state is returned once; later calls return PARAM_INVALID. Returns
  // NOT_CONNECTED if Disconnect has cancelled the request.
  Status GetTransferStatus(const TransferReq &req, TransferStatus &status) {
    auto state = static_cast<uint32_t>(TransferStatus::FAILED);
    const Status result = llm_datadist_hixl_transfer_state(handle_, view::Number(req), &state);
    status = static_cast<TransferStatus>(state);
    return result;
  }

  // Sets results to the states of requests in the order of their start. Each final state is returned once.
  Status GetTransferStatus(const GetTransferStatusArgs &args, std::vector<TransferResult> &results) {
    const LlmDatadistHixlResult *list = nullptr;
    size_t count = 0U;
    const Status status =
        llm_datadist_hixl_transfer_states(handle_, args.max_query_count, args.skip_waiting, &list, &count);
    results.clear();
    results.resize(count);
    for (size_t i = 0U; i < count; ++i) {
      results[i].req = view::Pointer(list[i].request);
      results[i].user_data = view::Pointer(list[i].user_data);
      results[i].status = static_cast<TransferStatus>(list[i].state);
    }
    return status;
  }

  // Sends a notification to the program of another engine. After SUCCESS, the other engine has received it. Returns
  // RESOURCE_EXHAUSTED while the other program has not read 4,096 notifications of this engine.
  Status SendNotify(const AscendString &remote_engine, const NotifyDesc &notify, int32_t timeout_in_millis = 1000) {
    return llm_datadist_hixl_send_notify(handle_, view::Of(remote_engine),
                                         {view::Of(notify.name), view::Of(notify.notify_msg)}, timeout_in_millis);
  }

  // Appends all notifications that were not read to notifies.
  Status GetNotifies(std::vector<NotifyDesc> &notifies) {
    const LlmDatadistHixlNotice *list = nullptr;
    size_t count = 0U;
    const Status status = llm_datadist_hixl_notifies(handle_, &list, &count);
    notifies.reserve(notifies.size() + count);
    for (size_t i = 0U; i < count; ++i) {
      notifies.push_back({view::Of(list[i].name), view::Of(list[i].message)});
    }
    return status;
  }

  // Sets value to FEATURE_SUPPORTED or FEATURE_NOT_SUPPORTED. Needs no engine.
  static Status GetCapability(FeatureType feature_type, int32_t &value) {
    value = FEATURE_NOT_SUPPORTED;
    return view::Understood() ? llm_datadist_hixl_capability(static_cast<int32_t>(feature_type), &value) : FAILED;
  }

 private:
  const uint64_t handle_;
};

}  // namespace hixl

#endif  // HIXL_HIXL_H_
