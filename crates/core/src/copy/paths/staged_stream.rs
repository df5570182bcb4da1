//! Moves a range of a plan between a stream and memory that the CPU cannot address, through two host buffers: while the
//! stream moves one, the device fills or empties the other.

use std::ops::Range;
use std::sync::Arc;

use super::data_path::{PathJob, before_batch};
use crate::copy::host_buffers::{BUFFER_BYTES, HostBuffer, PackedWindows};
use crate::copy::progress::{Progress, with_copied_bytes};
use crate::copy::window_sum::WindowSum;
use crate::copy::workers::SharedJob;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Tensors;
use crate::model::Placement;
use crate::net::{PADDING_INTERVAL, Stream};
use crate::plan::{CopyPlan, Side};
use crate::sync::Mutex;

const _: () = assert!(PADDING_INTERVAL.is_multiple_of(BUFFER_BYTES), "a buffer never crosses padding");

/// One end of a plan, in memory of a device.
#[derive(Clone)]
struct DeviceEnd {
    plan: CopyPlan,
    end: Side,
    tensors: Arc<Tensors>,
    device: Arc<dyn Device>,
}

/// The hop between a device and a buffer, in progress.
struct Hop {
    // First, because fields are dropped in order, and the drop of a job waits until no thread is inside.
    job: SharedJob,
    /// `None` while the hop runs.
    buffer: Arc<Mutex<Option<HostBuffer>>>,
}

impl Hop {
    /// Waits until the hop has ended, or runs it if no worker has begun it. Returns the buffer.
    fn finish(self) -> Result<HostBuffer> {
        self.job.finish()?;
        let buffer = self.buffer.lock().take();
        buffer.ok_or_else(|| Error::new(ErrorKind::System, "the buffer of a hop is gone"))
    }
}

/// A range of a plan that moves between a stream and memory of a device.
pub(super) struct StagedRange<'a> {
    pub(super) job: PathJob<'a>,
    pub(super) range: Range<u64>,
    pub(super) stream: &'a Stream,
}

impl StagedRange<'_> {
    /// Sends the bytes from memory of a device.
    pub(super) fn send(
        &self,
        src: &Arc<Tensors>,
        mut sum: Option<&mut WindowSum>,
        progress: &Progress,
    ) -> Result<()> {
        let (stream, range, PathJob { copy_engine, deadline, .. }) = (self.stream, &self.range, self.job);
        let end = self.device_end(Side::Source, src);
        let mut cuts = cuts(range).peekable();
        let mut spare = Some(copy_engine.host_buffers.take()?);
        // The stream has nothing to send yet, so this thread runs the first hop itself.
        let first = cuts.peek().map(|first| self.hop(&end, first.clone(), &mut spare, 0));
        let mut filling = first.transpose()?;
        let mut send = || -> Result<()> {
            while let (Some(cut), Some(hop)) = (cuts.next(), filling.take()) {
                let buffer = hop.finish()?;
                let next = cuts.peek().map(|next| self.hop(&end, next.clone(), &mut spare, 1));
                filling = next.transpose()?;
                before_batch(range, cut.start, deadline, || stream.send_padding(deadline))?;
                let window = buffer.window(0, cut.end - cut.start)?;
                if let Some(sum) = &mut sum {
                    sum.add(window.into())?;
                }
                stream.send_windows(&[window], deadline)?;
                progress.done(cut.start, cut.end);
                spare = Some(buffer);
            }
            Ok(())
        };
        send().map_err(|error| with_copied_bytes(error, progress, self.job.plan.bytes()))
    }

    /// Receives the bytes into memory of a device.
    pub(super) fn receive(&self, dst: &Arc<Tensors>, progress: &Progress) -> Result<()> {
        let (stream, range, PathJob { copy_engine, deadline, .. }) = (self.stream, &self.range, self.job);
        let end = self.device_end(Side::Destination, dst);
        let mut emptying: Option<(Range<u64>, Hop)> = None;
        let mut spare = None;
        let mut receive = || -> Result<()> {
            for cut in cuts(range) {
                let buffer = spare.take().map_or_else(|| copy_engine.host_buffers.take(), Ok)?;
                before_batch(range, cut.start, deadline, || stream.receive_padding(deadline))?;
                let received = {
                    let window = buffer.window(0, cut.end - cut.start)?;
                    stream.receive_counted(&[window], deadline, &mut 0)
                };
                spare = emptied(emptying.take(), progress)?;
                received?;
                // After the last cut the stream has nothing left to receive, so this thread runs the last hop itself.
                let helpers = usize::from(cut.end < range.end);
                let hop = self.hop(&end, cut.clone(), &mut Some(buffer), helpers)?;
                emptying = Some((cut, hop));
            }
            emptied(emptying.take(), progress).map(drop)
        };
        receive().map_err(|error| with_copied_bytes(error, progress, self.job.plan.bytes()))
    }

    fn device_end(&self, end: Side, tensors: &Arc<Tensors>) -> DeviceEnd {
        let device = self.job.copy_engine.devices.at(Placement::Device).clone();
        DeviceEnd { plan: self.job.plan.clone(), end, tensors: tensors.clone(), device }
    }

    /// Starts the hop of the bytes `cut`, through the buffer in `spare` or another one, on at most `helpers` workers.
    fn hop(
        &self,
        end: &DeviceEnd,
        cut: Range<u64>,
        spare: &mut Option<HostBuffer>,
        helpers: usize,
    ) -> Result<Hop> {
        let copy_engine = self.job.copy_engine;
        let buffer = spare.take().map_or_else(|| copy_engine.host_buffers.take(), Ok)?;
        let buffer = Arc::new(Mutex::new(Some(buffer)));
        let (end, kept) = (end.clone(), buffer.clone());
        let work = move |_| {
            let Some(buffer) = kept.lock().take() else { return Ok(()) };
            let hopped = end.hop(&cut, &buffer);
            *kept.lock() = Some(buffer);
            hopped
        };
        Ok(Hop { job: copy_engine.workers().start(Arc::new(work), 1, helpers), buffer })
    }
}

/// Cuts a range into parts that fit a buffer.
fn cuts(range: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let Range { start, end } = *range;
    (0..(end - start).div_ceil(BUFFER_BYTES)).map(move |index| {
        let from = start + index * BUFFER_BYTES;
        from..end.min(from + BUFFER_BYTES)
    })
}

/// Waits until a buffer is emptied, notes its bytes as in place, and returns the buffer.
fn emptied(emptying: Option<(Range<u64>, Hop)>, progress: &Progress) -> Result<Option<HostBuffer>> {
    let Some((cut, hop)) = emptying else { return Ok(None) };
    let buffer = hop.finish()?;
    progress.done(cut.start, cut.end);
    Ok(Some(buffer))
}

impl DeviceEnd {
    /// Has the device copy the bytes `cut` of the plan between its memory and the start of the buffer.
    fn hop(&self, cut: &Range<u64>, buffer: &HostBuffer) -> Result<()> {
        let mut packed = PackedWindows::new(&*self.device, buffer, self.end);
        for (tensor, span) in self.plan.spans(cut.start, cut.end) {
            let (number, (start, step)) = (self.plan.tensors(self.end).tensor(tensor), span.start(self.end));
            let windows = self.tensors.windows(number, start, span.len, (span.count, step))?;
            windows.iter().try_for_each(|window| packed.add(window))?;
        }
        packed.flush().map(drop)
    }
}
