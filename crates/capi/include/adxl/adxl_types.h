// The status values, options and structures of the class adxl::AdxlEngine. Include adxl/adxl_engine.h instead.
#ifndef ADXL_ADXL_TYPES_H_
#define ADXL_ADXL_TYPES_H_

#include "hixl/hixl_types.h"

namespace adxl {

using AscendString = ge::AscendString;
using hixl::MemHandle;
using hixl::TransferReq;

using hixl::Status;
using hixl::SUCCESS;
using hixl::PARAM_INVALID;
using hixl::TIMEOUT;
using hixl::NOT_CONNECTED;
using hixl::ALREADY_CONNECTED;
using hixl::NOTIFY_FAILED;
using hixl::UNSUPPORTED;
using hixl::RESOURCE_EXHAUSTED;
using hixl::FAILED;

using hixl::OPTION_ENABLE_USE_FABRIC_MEM;
using hixl::OPTION_GLOBAL_RESOURCE_CONFIG;
using hixl::OPTION_AUTO_CONNECT;
constexpr const char OPTION_RDMA_TRAFFIC_CLASS[] = "adxl.RdmaTrafficClass";
constexpr const char OPTION_RDMA_SERVICE_LEVEL[] = "adxl.RdmaServiceLevel";
constexpr const char OPTION_BUFFER_POOL[] = "adxl.BufferPool";
constexpr const char OPTION_LOCAL_COMM_RES[] = "adxl.LocalCommRes";

using hixl::FeatureType;
using hixl::AUTO_CONNECT;
using hixl::CLIENT_SERVER_COMM;
using hixl::FEATURE_NOT_SUPPORTED;
using hixl::FEATURE_SUPPORTED;

using hixl::MemType;
using hixl::MEM_DEVICE;
using hixl::MEM_HOST;
using hixl::TransferOp;
using hixl::READ;
using hixl::WRITE;
using hixl::TransferStatus;

using hixl::MemDesc;
using hixl::NotifyDesc;
using hixl::TransferOpDesc;

// There are no arguments yet.
struct TransferArgs {
  uint8_t reserved[128] = {};
};

}  // namespace adxl

#endif  // ADXL_ADXL_TYPES_H_
