"""One full example per message version, the source of the golden bytes. Never edit one: a new version gets its own."""

from __future__ import annotations

import msgspec

from fleet_contracts.audio import TranscriptHead, TranscriptSegment, TranscriptWord
from fleet_contracts.base import IngressId, Modality, PriorityClass, RequestId, Stage, StepId, WorkerId
from fleet_contracts.control import (
    IngressInfo,
    LeaderInfo,
    ModelCard,
    PoolRoute,
    Route,
    RoutingTable,
    Telemetry,
    WorkerInfo,
    WorkerShare,
)
from fleet_contracts.decode import DecodeParams, TokenAlternative, TokenLogprob
from fleet_contracts.diffusion import EditParams
from fleet_contracts.embed import EmbedParams, EmbedResult
from fleet_contracts.events import (
    Attempt,
    ChoiceProgress,
    Chunk,
    Claim,
    ClaimReply,
    Confirm,
    Failed,
    Failure,
    Finished,
    Picture,
    RootLost,
    Started,
    StepDone,
    TimelineQuery,
    TimelineReply,
    Token,
    Usage,
)
from fleet_contracts.jobs import FileRecord, JobLease, JobRecord, JobStatus, LineOutcome
from fleet_contracts.models import AdapterSpec, ModelSpec, ModelState, ModelStatus
from fleet_contracts.preprocess import EditFiles, MediaItem, PreprocessParams, PreprocessResult
from fleet_contracts.tensors import (
    ArenaPlace,
    InlinePlace,
    NetworkPlace,
    SpillReply,
    SpillRequest,
    TensorRef,
)
from fleet_contracts.vision import AudioEncodeParams, VideoEncodeParams, VisionParams
from fleet_contracts.work import (
    Cancel,
    DeadLetter,
    EventAddress,
    JoinRecord,
    Plan,
    PlanStep,
    StepOutput,
    StepTask,
)

_REQUEST = RequestId("1a2b3c4d_00112233445566778899aabbccddeeff")
_PRE, _ENC, _DEC = StepId("pre"), StepId("enc0"), StepId("dec")
_MEDIA = MediaItem(
    part="messages[0].content[1].image_url",
    kind="image",
    width=64,
    height=64,
    mode="RGB",
    sha256="ab" * 32,
    num_tokens=16,
    source_width=640,
    source_height=480,
)
_ARENA = TensorRef(
    place=ArenaPlace(boot_id="boot", segment="omnifleet-a-1", slot=3, generation=42),
    dtype="float32",
    shape=(16, 576),
    nbytes=36864,
    content_hash="cd" * 32,
    expires_unix_s=1060.0,
)
_INLINE = TensorRef(place=InlinePlace(data=b"\x01\x00\x00\x00"), dtype="int32", shape=(1,), nbytes=4)
_NETWORK = TensorRef(place=NetworkPlace(connector="redis", key="t:1"), dtype="uint8", shape=(2000,), nbytes=2000)
_ATTEMPT = Attempt(
    request_id=_REQUEST, step_id=_DEC, stage=Stage.DECODE, worker_id=WorkerId("decode-0"), epoch=0, delivery=1
)
_PRE_OUTPUT = StepOutput(
    step_id=_PRE,
    epoch=0,
    tensors={"prompt": _INLINE, "pixels0": _NETWORK},
    result=PreprocessResult(num_prompt_tokens=40, media=(_MEDIA,)),
)
_PLAN = Plan(
    steps=(
        PlanStep(step_id=_PRE, stage=Stage.PREPROCESS, model="vlm", params=PreprocessParams(max_new_tokens=16)),
        PlanStep(step_id=_ENC, stage=Stage.VISION_ENCODE, model="vlm", params=VisionParams(items=(0,)), needs=(_PRE,)),
        PlanStep(
            step_id=_DEC,
            stage=Stage.DECODE,
            model="vlm",
            params=DecodeParams(max_tokens=16, temperature=0.0, stop=("END",)),
            needs=(_PRE, _ENC),
        ),
    )
)
_TASK = StepTask(
    request_id=_REQUEST,
    step_id=_DEC,
    epoch=0,
    plan=_PLAN,
    model="vlm",
    priority_class=PriorityClass.REALTIME,
    tenant="default",
    deadline_unix_s=1060.0,
    enqueued_unix_s=1000.0,
    events=EventAddress(ingress_id=IngressId("1a2b3c4d"), nonce="0123456789abcdef"),
    inputs={"pre": _PRE_OUTPUT, "enc0": StepOutput(step_id=_ENC, epoch=0, tensors={"embeds0": _ARENA})},
    root=_NETWORK,
    trace={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
)
_LOGPROB = TokenLogprob(
    chosen=TokenAlternative(token=" Paris", token_id=7042, logprob=-0.1, bytes_=b" Paris"),
    top=(TokenAlternative(token=" Paris", token_id=7042, logprob=-0.1, bytes_=b" Paris"),),
)
_CARD = ModelCard(
    model="vlm", input_modalities=(Modality.TEXT, Modality.IMAGE), context_tokens=2048, image_tokens=16, hidden_size=576
)

EXAMPLES: tuple[msgspec.Struct, ...] = (
    _TASK,
    JoinRecord(inputs={"enc0": _TASK.inputs["enc0"]}),
    Cancel(request_id=_REQUEST, reason="client_gone", deadline_unix_s=1060.0),
    DeadLetter(
        stage=Stage.DECODE,
        reason="max_deliver",
        payload=b"\x80",
        subject="fleet.work.decode.decode-cpu.realtime.any",
        num_delivered=5,
        died_unix_s=1030.0,
    ),
    Started(attempt=_ATTEMPT, seq=0),
    Token(attempt=_ATTEMPT, seq=1, choice=0, index=0, token_ids=(7042,), text=" Paris", logprobs=(_LOGPROB,)),
    Chunk(attempt=_ATTEMPT, seq=2, media_type="audio/pcm;rate=24000", data=b"\x00\x01", index=1, num_pieces=2),
    TranscriptHead(language="en", duration_s=1.5),
    TranscriptSegment(
        text=" Paris.",
        start_s=0.0,
        end_s=1.5,
        token_ids=(6342, 13),
        words=(TranscriptWord(text=" Paris.", start_s=0.0, end_s=1.5, probability=0.5),),
    ),
    StepDone(
        attempt=_ATTEMPT,
        seq=2,
        pool="decode-cpu",
        queued_unix_s=1000.0,
        started_unix_s=1000.1,
        finished_unix_s=1001.0,
        batch_size=4,
        bytes_in=36868,
        media=(_MEDIA,),
    ),
    Finished(attempt=_ATTEMPT, seq=3, usage=Usage(prompt_tokens=40, completion_tokens=1), num_tokens=(1,)),
    Failed(
        attempt=_ATTEMPT,
        seq=3,
        failure=Failure(
            error_type="invalid_request_error",
            code="invalid_image",
            message="not an image",
            status=400,
            param="messages[0].content[1].image_url",
        ),
    ),
    Picture(
        attempt=_ATTEMPT,
        seq=1,
        choice=0,
        index=1,
        media_type="image/png",
        width=64,
        height=64,
        file=_NETWORK,
        is_final=True,
    ),
    Claim(attempt=_ATTEMPT),
    ClaimReply(status="granted", choices=(ChoiceProgress(token_ids=(7042,), num_text_chars=6),)),
    Confirm(status="resend", resend_from_seq=1),
    RootLost(attempt=_ATTEMPT),
    TimelineQuery(request_id=_REQUEST, tenant="default"),
    TimelineReply(body=b"{}"),
    SpillRequest(ref=_ARENA),
    SpillReply(ref=_NETWORK),
    WorkerInfo(
        worker_id=WorkerId("decode-0"),
        stage=Stage.DECODE,
        pool="decode-cpu",
        host="host",
        pid=1,
        state="ready",
        slots=8,
        locality="boot",
        cards=(_CARD,),
        release="0.1.0",
        started_unix_s=990.0,
    ),
    IngressInfo(ingress_id="1a2b3c4d", host="host", pid=2, url="http://127.0.0.1:8080"),
    LeaderInfo(instance_id="placement-1a2b3c4d", host="host", pid=3, since_unix_s=1000.0, url="http://127.0.0.1:9100"),
    Telemetry(
        worker_id=WorkerId("decode-0"),
        stage=Stage.DECODE,
        pool="decode-cpu",
        sent_unix_s=1000.0,
        slots=8,
        state="ready",
        queued={"realtime": 2},
        in_flight=3,
        service_s=0.5,
    ),
    RoutingTable(
        revision=7,
        made_unix_s=1000.0,
        policy="least_loaded",
        routes=(
            Route(
                stage=Stage.DECODE,
                model="vlm",
                pools=(
                    PoolRoute(
                        pool="decode-cpu",
                        weight_ratio=1.0,
                        locality="boot",
                        workers=(WorkerShare(worker_id=WorkerId("decode-0"), share_ratio=1.0),),
                    ),
                ),
            ),
        ),
        models=(_CARD,),
        reasons=("decode-0 joined",),
    ),
    EmbedParams(dimensions=128),
    AudioEncodeParams(items=(1,)),
    VideoEncodeParams(items=(0,)),
    EmbedResult(num_prompt_tokens=9),
    EditParams(width=64, height=64, prompt="a red star", strength=0.6, num_images=2, has_mask=True),
    EditFiles(images=(b"\x89PNG", b"\xff\xd8"), mask=b"\x89PNG"),
    ModelSpec(
        model="org/text",
        source="/models/text",
        generation=2,
        replicas={Stage.DECODE: 2},
        engine_args={Stage.DECODE: {"max_model_len": 2048}},
        adapters=(AdapterSpec(name="pirate", path="/adapters/pirate"),),
        takes_adapters=True,
    ),
    ModelStatus(
        model="org/text",
        generation=2,
        state=ModelState.READY,
        since_unix_s=1000.0,
        adapters=("pirate",),
        adapter_errors={"late": "it holds no adapter_config.json"},
    ),
    FileRecord(
        file_id="file-00112233445566778899aabb",
        tenant="default",
        filename="requests.jsonl",
        purpose="batch",
        num_bytes=120,
        created_unix_s=1000.0,
        expires_unix_s=2000.0,
    ),
    JobRecord(
        job_id="batch_00112233445566778899aabb",
        kind="batch",
        tenant="default",
        endpoint="/v1/chat/completions",
        status=JobStatus.IN_PROGRESS,
        num_lines=50,
        created_unix_s=1000.0,
        expires_unix_s=87400.0,
        num_done=4,
        num_failed=1,
        input_file_id="file-00112233445566778899aabb",
        completion_window="24h",
        metadata={"night": "1"},
        reached_unix_s={"in_progress": 1001.0},
    ),
    JobLease(ingress_id="1a2b3c4d"),
    LineOutcome(line=1, custom_id="a", status=200, request_id=_REQUEST, body=b"{}"),
)
