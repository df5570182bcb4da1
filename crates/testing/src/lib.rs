//! What the tests of the core run beside it: nothing here is part of a library that users install.
//!
//! - [`oracle`] is a plain reference model of the engine.
//! - [`SimDevice`] is a device whose memory the CPU cannot address.
//! - [`Local`] is a transport within one process, and [`Faulty`] one whose streams break as told.

mod faulty;
mod in_process;
pub mod oracle;
mod sim;

pub use faulty::{Fault, Faults, Faulty};
pub use in_process::Local;
pub use sim::SimDevice;
