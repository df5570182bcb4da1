// The status values, options and structures of the class hixl::Hixl. Include hixl/hixl.h instead.
//
// Structures end in reserved bytes, so that they can grow without changing their size.
#ifndef HIXL_HIXL_TYPES_H_
#define HIXL_HIXL_TYPES_H_

#include <cstddef>
#include <cstdint>

#include "hixl/ascend_string.h"

namespace hixl {

using AscendString = ge::AscendString;
using MemHandle = void *;
using TransferReq = void *;

// The state of an asynchronous transfer. No call returns TIMEOUT. The type is declared before the
// status values, because its names would shadow two of them.
enum class TransferStatus { WAITING = 0, COMPLETED = 1, TIMEOUT = 2, FAILED = 3 };

// The status that every call returns.
using Status = uint32_t;

constexpr Status SUCCESS = 0U;
// A wrong value, address, range or option, or an unknown request.
constexpr Status PARAM_INVALID = 103900U;
// The time limit has passed.
constexpr Status TIMEOUT = 103901U;
// This engine is not connected to that engine.
constexpr Status NOT_CONNECTED = 103902U;
// The connection exists.
constexpr Status ALREADY_CONNECTED = 103903U;
// Reserved. No call returns it.
constexpr Status NOTIFY_FAILED = 103904U;
// Not available in this mode. No call returns it.
constexpr Status UNSUPPORTED = 103905U;
// A queue is full, or there is no memory.
constexpr Status RESOURCE_EXHAUSTED = 203900U;
// Every other failure, and every call on an object that is not initialized.
constexpr Status FAILED = 503900U;

// Keys of the options of Initialize. Keys and values are texts.
constexpr const char OPTION_ENABLE_USE_FABRIC_MEM[] = "EnableUseFabricMem";
constexpr const char OPTION_RDMA_TRAFFIC_CLASS[] = "RdmaTrafficClass";
constexpr const char OPTION_RDMA_SERVICE_LEVEL[] = "RdmaServiceLevel";
constexpr const char OPTION_BUFFER_POOL[] = "BufferPool";
constexpr const char OPTION_GLOBAL_RESOURCE_CONFIG[] = "GlobalResourceConfig";
constexpr const char OPTION_AUTO_CONNECT[] = "AutoConnect";
constexpr const char OPTION_LOCAL_COMM_RES[] = "LocalCommRes";

// What GetCapability is asked for, and its answers.
enum FeatureType : int32_t { AUTO_CONNECT = 0, CLIENT_SERVER_COMM = 1 };
constexpr int32_t FEATURE_NOT_SUPPORTED = 0;
constexpr int32_t FEATURE_SUPPORTED = 1;

// The type of the memory of a range. All memory is host memory, so both types are treated alike.
enum MemType { MEM_DEVICE = 0, MEM_HOST = 1 };

// The direction of a transfer: READ copies from the other engine to the caller, WRITE the other way.
enum TransferOp { READ = 0, WRITE = 1 };

// The state of an asynchronous connection.
enum class AsyncConnectStatus {
  NOT_CONNECT = 0,
  CONNECT_PENDING = 1,
  CONNECTING = 2,
  CONNECTED = 3,
  CONNECT_FAILED = 4,
  DISCONNECT_PENDING = 5,
  DISCONNECTING = 6
};

// A range of memory to register. With local_only, peers cannot use it.
struct MemDesc {
  uintptr_t addr;
  size_t len;
  bool local_only = false;
  uint8_t reserved[127] = {};
};

// One operation of a transfer: len bytes at local_addr in this process and at remote_addr at the other engine.
struct TransferOpDesc {
  uintptr_t local_addr;
  uintptr_t remote_addr;
  size_t len;
};

// Optional arguments of TransferAsync. GetTransferStatus returns user_data with the state of the transfer.
struct TransferArgs {
  const void *user_data = nullptr;
  uint8_t reserved[120] = {};
};

// Which transfers GetTransferStatus returns: at most max_query_count, and none that are waiting with skip_waiting.
struct GetTransferStatusArgs {
  uint32_t max_query_count = UINT32_MAX;
  bool skip_waiting = false;
  uint8_t reserved[123] = {};
};

// The state of one transfer.
struct TransferResult {
  TransferReq req = nullptr;
  const void *user_data = nullptr;
  TransferStatus status = TransferStatus::WAITING;
  uint8_t reserved[108] = {};
};

// A notification. Each text has at most 1,024 bytes of UTF-8.
struct NotifyDesc {
  AscendString name;
  AscendString notify_msg;
};

// Layouts that programs of different versions share.
static_assert(sizeof(uintptr_t) == 8U && sizeof(size_t) == 8U, "addresses and lengths are numbers of 64 bits");
static_assert(sizeof(MemDesc) == 144U && sizeof(TransferOpDesc) == 24U, "layout");
static_assert(sizeof(TransferArgs) == 128U && sizeof(GetTransferStatusArgs) == 128U, "layout");
static_assert(sizeof(TransferResult) == 128U, "layout");

}  // namespace hixl

#endif  // HIXL_HIXL_TYPES_H_
