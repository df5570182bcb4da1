//! Test tools for the core. Nothing here is part of a library that users install.
//!
//! - [`oracle`] is a plain reference model of the engine.
//! - [`SimDevice`] is a device whose memory the CPU cannot address.
//! - [`Stall`] has reads of another process's memory wait.
//! - [`Faulty`] is a transport whose streams break on request.
//!
//! # What must not compile
//!
//! Types enforce the promises of the module `memory`. For each promise, a program here breaks it. The first
//! program compiles, so the others fail for what they break and not for a misspelled name.
//!
//! ```
//! use llm_datadist_core::testing::memory::kernels::Kernel;
//! use llm_datadist_core::testing::memory::{Adopted, Tensors, Window};
//! use llm_datadist_core::{CacheDesc, CacheKind, DataType, Placement};
//! let bytes = vec![0u8; 4];
//! let desc = CacheDesc { num_tensors: 1, shape: vec![4], data_type: DataType::Uint8, placement: Placement::Host, row_stride: None, kv_layout: None };
//! // SAFETY: `bytes` outlives everything made from the value.
//! let adopted = unsafe { Adopted::new(&desc, CacheKind::Batch, &[bytes.as_ptr() as u64]) }.unwrap();
//! let tensors: Tensors = Tensors::adopted(adopted);
//! let window: Window<'_> = tensors.window(0, 0, 4).unwrap();
//! assert_eq!(window.len(), 4);
//! let _: (Kernel, &[Kernel]) = (Kernel::PLAIN, Kernel::all());
//! ```
//!
//! Adopting the caller's memory needs `unsafe`:
//!
//! ```compile_fail,E0133
//! use llm_datadist_core::{Adopted, CacheDesc, CacheKind, DataType, Placement};
//! let desc = CacheDesc { num_tensors: 1, shape: vec![4], data_type: DataType::Uint8, placement: Placement::Host, row_stride: None, kv_layout: None };
//! let _ = Adopted::new(&desc, CacheKind::Batch, &[4096]);
//! ```
//!
//! A window does not outlive the tensors from which it was cut:
//!
//! ```compile_fail,E0505
//! use llm_datadist_core::testing::memory::{Tensors, Window};
//! fn keep(tensors: Tensors) -> u64 {
//!     let window: Window<'_> = tensors.window(0, 0, 1).unwrap();
//!     drop(tensors);
//!     window.addr()
//! }
//! ```
//!
//! The bounds of a window cannot be changed, and no window can be made from plain numbers:
//!
//! ```compile_fail,E0616
//! use llm_datadist_core::testing::memory::Window;
//! fn widen(mut window: Window<'_>) {
//!     window.len = u64::MAX;
//! }
//! ```
//!
//! ```compile_fail,E0451
//! use llm_datadist_core::testing::memory::Window;
//! let _ = Window { addr: 0, len: 8, reach: llm_datadist_core::testing::memory::Reach::Host, tensors: std::marker::PhantomData };
//! ```
//!
//! The streaming kernel is available only from the CPU that has it:
//!
//! ```compile_fail,E0423
//! use llm_datadist_core::testing::memory::kernels::Kernel;
//! let _ = Kernel(0);
//! ```
//!
//! Adopted memory and pins have one owner:
//!
//! ```compile_fail,E0599
//! use llm_datadist_core::Adopted;
//! fn twice(adopted: &Adopted) -> Adopted {
//!     <Adopted as Clone>::clone(adopted)
//! }
//! ```
//!
//! ```compile_fail,E0308
//! use llm_datadist_core::testing::cache::Pin;
//! fn twice(pin: &Pin) -> Pin {
//!     pin.clone()
//! }
//! ```
//!
//! A checked geometry cannot be constructed directly:
//!
//! ```compile_fail,E0451
//! use llm_datadist_core::bindings::Geometry;
//! let _ = Geometry { num_tensors: 1, rows: 1, row_bytes: u64::MAX };
//! ```

mod faulty;
pub mod oracle;
mod sim;
mod stalled;

pub use faulty::{Fault, Faults, Faulty};
pub use sim::{SimDevice, host_address};
pub use stalled::Stall;
