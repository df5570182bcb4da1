//! The basic types of the engine: ids, keys, cache descriptions and deadlines.

mod cache_desc;
mod deadline;
mod grant;
mod ids;
mod keys;
mod kv_geometry;
mod kv_layout;
mod named_enum;
mod remote_cache_name;
mod row_sizes;
mod sub_row;
mod text_names;
mod verify;
mod while_refused;
mod words;

pub use cache_desc::{CacheDesc, CacheKind, CacheLayout, DataType, Geometry, Placement, tensor_bytes};
pub use deadline::Deadline;
pub use grant::{GrantEnd, GrantId, GrantToken, GrantUse};
pub use ids::{AddressLocation, CacheId, ClusterId};
pub use keys::{CacheKey, NO_ID, Name};
pub use kv_geometry::KvGeometry;
pub use kv_layout::{KvLayout, KvPlanes, TokenOrder};
pub(crate) use named_enum::named_enum;
pub use remote_cache_name::RemoteCacheName;
pub use row_sizes::RowSizes;
pub use sub_row::SubRow;
pub use text_names::{MAX_NAME, is_name};
pub use verify::Verify;
pub use while_refused::WhileRefused;
pub use words::{Argument, SideWords, Words};

/// Numbers of rows. One row takes no memory of its own.
pub type RowList = smallvec::SmallVec<[u64; 1]>;
