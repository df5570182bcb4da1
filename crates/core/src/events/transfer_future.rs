//! Awaiting a transfer in async code, under any runtime.

use std::future::IntoFuture;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::transfer::Transfer;
use crate::error::Result;

/// The end of a [`Transfer`]: a future that takes its outcome, as [`Transfer::join`] does. The engine wakes the task that polled
/// it last.
///
/// It needs no runtime. Dropping it neither cancels the transfer nor takes the outcome, which is an event then.
///
/// ```
/// use std::pin::pin;
/// use std::sync::Arc;
/// use std::task::{Context, Poll, Wake, Waker};
/// use std::thread::{Thread, current, park};
///
/// use llm_datadist_core::*;
///
/// /// The smallest runtime: its only task runs on one thread.
/// struct ThisThread(Thread);
///
/// impl Wake for ThisThread {
///     fn wake(self: Arc<Self>) {
///         self.0.unpark();
///     }
/// }
///
/// fn block_on<T>(task: impl Future<Output = T>) -> T {
///     let waker = Waker::from(Arc::new(ThisThread(current())));
///     let mut task = pin!(task);
///     loop {
///         match task.as_mut().poll(&mut Context::from_waker(&waker)) {
///             Poll::Ready(output) => return output,
///             Poll::Pending => park(),
///         }
///     }
/// }
///
/// let prefill = Engine::builder().name("prefill").pool(1 << 20).listen("127.0.0.1:0").open()?;
/// let decode = Engine::builder().name("decode").pool(1 << 20).option("timeout", 5.0).open()?;
/// let form = CacheForm::plain(2, 8, &[64], DataType::Float16, Placement::Device, None)?;
/// let (_, ours) = (prefill.allocate("kv", &form)?, decode.allocate("kv", &form)?);
///
/// block_on(async {
///     let linking = decode.link(&prefill.address()?.unwrap().to_string(), None, None, WhileRefused::Retry)?;
///     linking.as_ref().await?;
///     let remote = decode.peer_cache(linking.peer().unwrap().cluster, "kv")?;
///     let pull = decode.pull(&[(&ours.rows([7]), &remote.rows([3]))], PairExtras::default())?;
///     pull.as_ref().await?;
///     assert_eq!(pull.progress().done, 2 * 128);
///     let missing = decode.peer_cache(linking.peer().unwrap().cluster, "other")?;
///     let pull = decode.pull(&[(&ours.rows([7]), &missing.rows([3]))], PairExtras::default())?;
///     assert_eq!(pull.as_ref().await.unwrap_err().kind(), ErrorKind::CacheNotFound);
///     Ok::<(), Error>(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct TransferFuture<'a> {
    transfer: &'a Transfer,
    /// The number of its task at the transfer, once it was polled.
    task: Option<u64>,
}

impl Future for TransferFuture<'_> {
    type Output = Result<()>;

    /// Returns an error of kind [`OutOfMemory`](crate::ErrorKind::OutOfMemory) also if there is no memory for the task among
    /// those that the transfer wakes. The transfer has not ended then.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(task) = self.transfer.wake_task(self.task, context.waker())? {
            self.task = Some(task);
            return Poll::Pending;
        }
        self.transfer.outcome().map_or(Poll::Pending, |outcome| Poll::Ready(outcome.map(drop)))
    }
}

impl Drop for TransferFuture<'_> {
    fn drop(&mut self) {
        if let Some(task) = self.task {
            self.transfer.forget_task(task);
        }
    }
}

/// Awaits the end: `transfer.as_ref().await` for an `Arc<Transfer>`.
impl<'a> IntoFuture for &'a Transfer {
    type Output = Result<()>;
    type IntoFuture = TransferFuture<'a>;

    fn into_future(self) -> TransferFuture<'a> {
        TransferFuture { transfer: self, task: None }
    }
}
