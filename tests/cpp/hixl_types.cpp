// The headers of hixl and adxl in a second source file: nothing in them is defined twice. Also every number, key, default,
// size and offset of the interface, written by hand.
//
// Not for: what calls do with them (hixl_calls.cpp).
#include <cstring>
#include <map>
#include <type_traits>
#include <vector>

#include "adxl/adxl_engine.h"
#include "hixl/hixl.h"

namespace {

constexpr bool Same(const char *left, const char *right) {
  return *left == *right && (*left == '\0' || Same(left + 1, right + 1));
}
static_assert(!Same("AutoConnect", "AutoConnec") && !Same("AutoConnec", "AutoConnect"), "the comparison");

template <typename Enum, typename Number>
constexpr bool Is(Enum value, Number number) {
  return sizeof(Enum) == 4 && static_cast<Number>(value) == number;
}

#define CHECK_NAMES(space)                                                                                   \
  static_assert(std::is_same<space::Status, uint32_t>::value, "a status is a number of 32 bits");            \
  static_assert(std::is_same<space::MemHandle, void *>::value, "handle");                                    \
  static_assert(std::is_same<space::TransferReq, void *>::value, "request");                                 \
  static_assert(std::is_same<space::AscendString, ge::AscendString>::value, "text");                         \
  static_assert(space::SUCCESS == 0U && space::PARAM_INVALID == 103900U, "status");                          \
  static_assert(space::TIMEOUT == 103901U && space::NOT_CONNECTED == 103902U, "status");                     \
  static_assert(space::ALREADY_CONNECTED == 103903U && space::NOTIFY_FAILED == 103904U, "status");           \
  static_assert(space::UNSUPPORTED == 103905U && space::RESOURCE_EXHAUSTED == 203900U, "status");            \
  static_assert(space::FAILED == 503900U, "status");                                                         \
  static_assert(Same(space::OPTION_ENABLE_USE_FABRIC_MEM, "EnableUseFabricMem"), "option");                  \
  static_assert(Same(space::OPTION_GLOBAL_RESOURCE_CONFIG, "GlobalResourceConfig"), "option");               \
  static_assert(Same(space::OPTION_AUTO_CONNECT, "AutoConnect"), "option");                                  \
  static_assert(std::is_same<std::underlying_type<space::FeatureType>::type, int32_t>::value, "feature");    \
  static_assert(Is(space::AUTO_CONNECT, 0) && Is(space::CLIENT_SERVER_COMM, 1), "feature");                  \
  static_assert(space::FEATURE_SUPPORTED == 1 && space::FEATURE_NOT_SUPPORTED == 0, "feature");              \
  static_assert(Is(space::MEM_DEVICE, 0) && Is(space::MEM_HOST, 1), "memory");                               \
  static_assert(Is(space::READ, 0) && Is(space::WRITE, 1), "operation");                                     \
  static_assert(Is(space::TransferStatus::WAITING, 0) && Is(space::TransferStatus::COMPLETED, 1), "state");  \
  static_assert(Is(space::TransferStatus::TIMEOUT, 2) && Is(space::TransferStatus::FAILED, 3), "state");     \
  static_assert(sizeof(space::MemDesc) == 144 && sizeof(space::TransferOpDesc) == 24, "size");               \
  static_assert(sizeof(space::TransferArgs) == 128 && sizeof(space::NotifyDesc) == 32, "size")

CHECK_NAMES(hixl);
CHECK_NAMES(adxl);

static_assert(Same(hixl::OPTION_RDMA_TRAFFIC_CLASS, "RdmaTrafficClass"), "option");
static_assert(Same(hixl::OPTION_RDMA_SERVICE_LEVEL, "RdmaServiceLevel"), "option");
static_assert(Same(hixl::OPTION_BUFFER_POOL, "BufferPool"), "option");
static_assert(Same(hixl::OPTION_LOCAL_COMM_RES, "LocalCommRes"), "option");
static_assert(Same(adxl::OPTION_RDMA_TRAFFIC_CLASS, "adxl.RdmaTrafficClass"), "option");
static_assert(Same(adxl::OPTION_RDMA_SERVICE_LEVEL, "adxl.RdmaServiceLevel"), "option");
static_assert(Same(adxl::OPTION_BUFFER_POOL, "adxl.BufferPool"), "option");
static_assert(Same(adxl::OPTION_LOCAL_COMM_RES, "adxl.LocalCommRes"), "option");

using Connection = hixl::AsyncConnectStatus;
static_assert(Is(Connection::NOT_CONNECT, 0) && Is(Connection::CONNECT_PENDING, 1), "state");
static_assert(Is(Connection::CONNECTING, 2) && Is(Connection::CONNECTED, 3), "state");
static_assert(Is(Connection::CONNECT_FAILED, 4) && Is(Connection::DISCONNECT_PENDING, 5), "state");
static_assert(Is(Connection::DISCONNECTING, 6), "state");

static_assert(sizeof(hixl::GetTransferStatusArgs) == 128 && sizeof(hixl::TransferResult) == 128, "size");
static_assert(sizeof(ge::AscendString) == 16 && sizeof(hixl::Hixl) == 8 && sizeof(adxl::AdxlEngine) == 8, "size");
static_assert(offsetof(hixl::MemDesc, len) == 8 && offsetof(hixl::MemDesc, local_only) == 16, "offset");
static_assert(offsetof(hixl::TransferOpDesc, remote_addr) == 8 && offsetof(hixl::TransferOpDesc, len) == 16, "offset");
static_assert(offsetof(hixl::GetTransferStatusArgs, skip_waiting) == 4, "offset");
static_assert(offsetof(hixl::TransferResult, user_data) == 8 && offsetof(hixl::TransferResult, status) == 16, "offset");
static_assert(!std::is_copy_constructible<hixl::Hixl>::value, "an engine is one");
static_assert(!std::is_copy_assignable<hixl::Hixl>::value, "an engine is one");
static_assert(!std::is_polymorphic<hixl::Hixl>::value, "no virtual functions");
static_assert(!std::is_convertible<adxl::AdxlEngine *, hixl::Hixl *>::value, "two classes");

// The signatures of all methods, of which some have several.
using hixl::Hixl;
using Text = const ge::AscendString &;
using Options = const std::map<ge::AscendString, ge::AscendString> &;
using Ops = const std::vector<hixl::TransferOpDesc> &;
template <typename... Arguments>
constexpr bool Has(hixl::Status (Hixl::*)(Arguments...)) {
  return true;
}
static_assert(Has<Text, Options>(&Hixl::Initialize), "signature");
static_assert(std::is_same<decltype(&Hixl::Finalize), void (Hixl::*)()>::value, "signature");
static_assert(Has<const hixl::MemDesc &, hixl::MemType, hixl::MemHandle &>(&Hixl::RegisterMem), "signature");
static_assert(Has<hixl::MemHandle>(&Hixl::DeregisterMem), "signature");
static_assert(Has<Text, int32_t>(&Hixl::Connect) && Has<Text, int32_t>(&Hixl::Disconnect), "signature");
static_assert(Has<Text, int32_t>(&Hixl::ConnectAsync) && Has<Text, int32_t>(&Hixl::DisconnectAsync), "signature");
static_assert(Has<Text, Connection &>(&Hixl::GetAsyncConnectStatus), "signature");
static_assert(Has<std::map<ge::AscendString, Connection> &>(&Hixl::GetAsyncConnectStatus), "signature");
static_assert(Has<Text, hixl::TransferOp, Ops, int32_t>(&Hixl::TransferSync), "signature");
static_assert(Has<Text, hixl::TransferOp, Ops, const hixl::TransferArgs &, hixl::TransferReq &>(&Hixl::TransferAsync),
              "signature");
static_assert(Has<const hixl::TransferReq &, hixl::TransferStatus &>(&Hixl::GetTransferStatus), "signature");
static_assert(Has<const hixl::GetTransferStatusArgs &, std::vector<hixl::TransferResult> &>(&Hixl::GetTransferStatus),
              "signature");
static_assert(Has<Text, const hixl::NotifyDesc &, int32_t>(&Hixl::SendNotify), "signature");
static_assert(Has<std::vector<hixl::NotifyDesc> &>(&Hixl::GetNotifies), "signature");
static_assert(std::is_same<decltype(&Hixl::GetCapability), hixl::Status (*)(hixl::FeatureType, int32_t &)>::value,
              "signature");

template <size_t size>
bool Zero(const uint8_t (&bytes)[size]) {
  for (const uint8_t byte : bytes) {
    if (byte != 0U) {
      return false;
    }
  }
  return true;
}

bool Defaults() {
  const hixl::MemDesc mem{1, 2};
  const hixl::TransferOpDesc op{3, 4, 5};
  const hixl::TransferArgs args;
  const adxl::TransferArgs none;
  const hixl::GetTransferStatusArgs query;
  const hixl::TransferResult result;
  const hixl::NotifyDesc notify{"a", "b"};
  return mem.addr == 1 && mem.len == 2 && !mem.local_only && Zero(mem.reserved) && op.local_addr == 3 &&
         op.remote_addr == 4 && op.len == 5 && args.user_data == nullptr && Zero(args.reserved) && Zero(none.reserved) &&
         query.max_query_count == 4294967295U && !query.skip_waiting && Zero(query.reserved) && result.req == nullptr &&
         result.user_data == nullptr && result.status == hixl::TransferStatus::WAITING && Zero(result.reserved) &&
         notify.name == "a" && notify.notify_msg == "b";
}

bool Texts() {
  const ge::AscendString none;
  const ge::AscendString null(nullptr);
  const ge::AscendString null_of_size(nullptr, 5);
  const ge::AscendString a("a");
  const ge::AscendString with_null("a\0b", 3);
  ge::AscendString copy(with_null);
  const bool shared = copy.GetString() == with_null.GetString();
  copy = a;
  const std::map<ge::AscendString, int> by_text{{"b", 2}, {"", 0}, {"a", 1}, {with_null, 3}};
  int order[4] = {};
  int at = 0;
  for (const auto &entry : by_text) {
    order[at++] = entry.second;
  }
  return none.GetLength() == 0 && *none.GetString() == '\0' && null == none && null_of_size == none && none == "" &&
         a.GetLength() == 1 && std::strcmp(a.GetString(), "a") == 0 && with_null.GetLength() == 3 && shared &&
         std::memcmp(with_null.GetString(), "a\0b", 4) == 0 && copy == a && a != with_null && a < with_null &&
         with_null > a && with_null <= "b" && a >= none && a <= a && a >= a && !(a < a) && !(a > a) &&
         order[0] == 0 && order[1] == 1 && order[2] == 3 && order[3] == 2;
}

}  // namespace

bool TypesOfHixlAreRight();

bool TypesOfHixlAreRight() { return Defaults() && Texts(); }
