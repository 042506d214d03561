class_name Campfire
extends Node
## Stories by the fire for Godot 4.2 and newer: the game protocol, version 1, with resume.
##
## Add it as a child node (or an autoload), connect its signals, and ask:
## [codeblock]
## var campfire := Campfire.new()
## campfire.url = "ws://127.0.0.1:8765"
## campfire.text.connect(func(_id, piece): $Story.text += piece)
## campfire.done.connect(func(_id, ending): print(ending["finish_reason"]))
## campfire.refused.connect(func(_id, error): print(error["message"]))
## add_child(campfire)
## campfire.ask({"words": ["dragon", "castle", "brave"], "voice": "old-sailor"})
## [/codeblock]
## A dropped connection is opened again, and each story goes on right behind the last piece that
## arrived: [signal text] never skips anything and never says anything twice. Every story ends with
## exactly one of [signal done], [signal refused] and [signal left].

signal welcomed(player: String, limits: Dictionary)
signal queued(id: String, story: String, position: int, eta_ms: int, opening: String)
signal text(id: String, piece: String)
signal done(id: String, ending: Dictionary)
signal refused(id: String, error: Dictionary)
signal left(id: String)
## The gateway closed for good (close codes from 4500): asking again needs another token or version.
signal closed_for_good(code: int, reason: String)

const PROTOCOL := 1
const HELLO_TIMEOUT_S := 10.0
const SILENCE_S := 30.0
const STEADY_S := 10.0
const FIRST_BACKOFF_S := 1.0
const LONGEST_BACKOFF_S := 30.0

@export var url := "ws://127.0.0.1:8765"
## A JWT, where the gateway wants one; its "sub" is the player.
@export var token := ""
## Without a token: the player's name. Empty: the gateway gives one, which is kept from then on.
@export var player := ""

var limits := {}

var _socket: WebSocketPeer
var _tales := {}  # id -> Tale, unfinished ones only
var _last_id := 0
var _failures := 0  # connections in a row that did not hold
var _has_said_hello := false
var _is_welcome := false
var _is_over := false
var _since_open := 0.0  # seconds since the socket was opened
var _since_frame := 0.0
var _retry_in := 0.0  # seconds; meaningful without a socket
var _move_in := -1.0  # seconds until another connection, as a draining gateway asks for; -1: stay


class Tale:
	var id: String
	var wish: Dictionary  # the ask; empty for a story that is only listened to
	var story := ""
	var cursor := ""
	var resume_in := -1.0  # seconds until a refused attachment is tried again; -1: not waiting


## Asks for a story. `wish` has "words" or "prompt", and any other field of the "ask" frame.
func ask(wish: Dictionary) -> String:
	var tale := _begin("a")
	tale.wish = wish.duplicate(true)
	tale.wish.merge({"type": "ask", "id": tale.id})
	# JSON numbers are floats here and keep 53 bits: a seed of our own can be told again.
	if not tale.wish.has("seed"):
		tale.wish["seed"] = randi()
	_attach(tale)
	return tale.id


## Listens to any story, from its beginning or right behind a cursor.
func listen(story: String, after := "") -> String:
	var tale := _begin("l")
	tale.story = story
	tale.cursor = after
	_attach(tale)
	return tale.id


## Ends a story, or a listening; after a reconnect always the listening only.
func stop(id: String) -> void:
	if not _tales.has(id):
		return
	if _is_welcome:
		_send({"type": "cancel", "id": id})
	else:
		_tales.erase(id)
		left.emit(id)


func _ready() -> void:
	randomize()
	_open()


func _exit_tree() -> void:
	if _socket != null:
		_socket.close(1000)


func _process(delta: float) -> void:
	if _is_over:
		return
	if _socket == null:
		_retry_in -= delta
		if _retry_in <= 0.0:
			_open()
		return
	_since_open += delta
	_since_frame += delta
	_socket.poll()
	while _socket != null and _socket.get_available_packet_count() > 0:
		_hear(_socket.get_packet().get_string_from_utf8())
	if _socket == null:
		return
	match _socket.get_ready_state():
		WebSocketPeer.STATE_OPEN:
			_keep(delta)
		WebSocketPeer.STATE_CLOSED:
			_lost(_socket.get_close_code(), _socket.get_close_reason())
		_:
			if _since_open > HELLO_TIMEOUT_S:
				_lost(1006, "no connection")


func _begin(prefix: String) -> Tale:
	_last_id += 1
	var tale := Tale.new()
	tale.id = prefix + str(_last_id)
	_tales[tale.id] = tale
	return tale


## Brings a story onto this connection: the ask itself, or a "listen" once the story has a name.
func _attach(tale: Tale) -> void:
	tale.resume_in = -1.0
	if not _is_welcome or _move_in >= 0.0:
		return  # the next welcome will attach it
	if tale.story.is_empty():
		_send(tale.wish)
		return
	var frame := {"type": "listen", "id": tale.id, "story": tale.story}
	if not tale.cursor.is_empty():
		frame["after"] = tale.cursor
	_send(frame)


func _open() -> void:
	_socket = WebSocketPeer.new()
	_is_welcome = false
	_move_in = -1.0
	_since_open = 0.0
	_since_frame = 0.0
	_has_said_hello = false
	if _socket.connect_to_url(url) != OK:
		_lost(1006, "no connection")


## What an open connection needs in every frame of the game.
func _keep(delta: float) -> void:
	if not _has_said_hello:
		_has_said_hello = true
		var hello := {"type": "hello", "protocol": PROTOCOL}
		if not token.is_empty():
			hello["token"] = token
		elif not player.is_empty():
			hello["player"] = player
		_send(hello)
	if not _is_welcome and _since_open > HELLO_TIMEOUT_S:
		_lost(1006, "no welcome")
	elif not _tales.is_empty() and _since_frame > SILENCE_S:
		_lost(1006, "silence")  # a dead line looks like a silent one
	elif _move_in >= 0.0:
		_move_in -= delta
		if _move_in < 0.0:
			_socket.close(1000)
			_open()
	for tale: Tale in _tales.values():
		if tale.resume_in >= 0.0:
			tale.resume_in -= delta
			if tale.resume_in < 0.0:
				_attach(tale)


func _hear(packet: String) -> void:
	_since_frame = 0.0
	var frame: Variant = JSON.parse_string(packet)
	if not frame is Dictionary:
		return
	var tale: Tale = _tales.get(frame.get("id", ""))
	match frame["type"]:
		"welcome":
			_is_welcome = true
			player = frame["player"]
			limits = frame["limits"]
			welcomed.emit(player, limits)
			for waiting: Tale in _tales.values():
				_attach(waiting)
		"reconnect":
			_move_in = randf_range(frame["in_ms"][0], frame["in_ms"][1]) / 1000.0
		"queued" when tale != null:
			tale.story = frame["story"]
			var opening: String = frame.get("opening", "")
			queued.emit(tale.id, tale.story, int(frame["position"]), int(frame["eta_ms"]), opening)
		"text" when tale != null:
			tale.cursor = frame["cursor"]
			text.emit(tale.id, frame["text"])
		"done" when tale != null:
			_tales.erase(tale.id)
			done.emit(tale.id, frame)
		"left" when tale != null:
			_tales.erase(tale.id)
			left.emit(tale.id)
		"error" when tale != null:
			if frame["temporary"] and not tale.story.is_empty():
				tale.resume_in = (
					frame.get("retry_after_ms", 1000.0) / 1000.0 * randf_range(1.0, 1.5)
				)
			else:
				_tales.erase(tale.id)
				refused.emit(tale.id, frame)


func _lost(code: int, reason: String) -> void:
	if _since_open > STEADY_S:
		_failures = 0
	_socket = null
	_is_welcome = false
	if code >= 4500 and code < 5000:
		_is_over = true
		for tale: Tale in _tales.values():
			refused.emit(tale.id, {"code": "unauthorized", "message": reason, "temporary": false})
		_tales.clear()
		closed_for_good.emit(code, reason)
		return
	if _move_in >= 0.0:
		_retry_in = _move_in  # told by the gateway, so that not all come at once
	else:
		_retry_in = randf_range(0.1, minf(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * pow(2.0, _failures)))
		_failures += 1


func _send(frame: Dictionary) -> void:
	_since_frame = 0.0
	_socket.send_text(JSON.stringify(frame))
