//! The kinds of data paths, and their names in reports.

use crate::model::named_enum;

named_enum! {
    /// The kind of a data path.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum PathKind {
        /// The engine that reads has mapped the memory of the other process.
        Mapped = "mapped",
        /// The engine that reads has the kernel read memory of the other process.
        Process = "process",
        /// UCX reads memory of the other process.
        Fabric = "fabric",
        /// The owner sends the bytes through rings in memory that the two processes share.
        Rings = "rings",
        /// The owner sends the bytes through a socket.
        Sockets = "sockets",
    }
}

impl PathKind {
    /// Whether the engine that reads sees the owner's generations, and so need not ask whether the memory still belonged to the
    /// cache. Only processes of one host share generations.
    pub fn sees_generations(self) -> bool {
        matches!(self, PathKind::Mapped | PathKind::Process)
    }
}
